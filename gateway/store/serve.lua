-- Say what tenants were served here, and hear what they were served at other gateways.
--
-- KEYS[1]  hash of gateways: id -> "<when it is forgotten, in µs> <what it said>"
-- ARGV     the gateway's id, what it says, how long that counts (µs)
-- reply    id and words of every other gateway that was heard lately, one after the other
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + ARGV[3], ARGV[2]))
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', ARGV[3] / 1000 + 1000))
local reply, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
    local ends, said = string.match(all[i + 1], '^(%d+) (.*)$')
    if tonumber(ends) < now then
        redis.call('HDEL', KEYS[1], all[i])
    elseif all[i] ~= ARGV[1] then
        reply[#reply + 1], reply[#reply + 2] = all[i], said
    end
end
return reply
