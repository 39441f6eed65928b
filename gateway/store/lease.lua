-- End or prolong leases of one tenant: those of requests that ended, or that still run.
--
-- KEYS[1]  a sorted set of requests by when their lease ends, as in reserve.lua
-- ARGV     how long from now in µs (0: they end), then the requests
-- reply    how many leases are held
--
-- One that has ended is not given back: it was free for others, and may be taken by now.
local life = tonumber(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i = 2, #ARGV do
    if life == 0 then
        redis.call('ZREM', KEYS[1], ARGV[i])
    else
        redis.call('ZADD', KEYS[1], 'XX', string.format('%.0f', now + life), ARGV[i])
    end
end
if life > 0 then
    redis.call('PEXPIRE', KEYS[1], string.format('%.0f', life / 1000 + 1000))
end
return redis.call('ZCARD', KEYS[1])
