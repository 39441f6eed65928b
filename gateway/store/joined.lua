-- The replicas that announce themselves and whose lease runs; the others are forgotten.
--
-- KEYS[1]  the hash of join.lua
-- reply    name and entry of each, one after the other
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local ends, entry = string.match(all[i + 1], '^(%d+) %S+ (.*)$')
    if tonumber(ends) <= now then
        redis.call('HDEL', KEYS[1], all[i])
    else
        reply[#reply + 1], reply[#reply + 2] = all[i], entry
    end
end
return reply
