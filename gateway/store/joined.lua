-- The replicas that announce themselves, and those whose lease has ended.
--
-- KEYS[1]  the hash of join.lua
-- reply    name and entry of each, one after the other; entry "" for one whose lease has ended
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local ends, entry = string.match(all[i + 1], '^(%d+) %S+ (.*)$')
    reply[#reply + 1] = all[i]
    reply[#reply + 1] = tonumber(ends) > now and entry or ''
end
return reply
