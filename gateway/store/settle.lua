-- Correct one limit of one tenant by actual minus reserved. Nobody is asked: it may go into debt.
--
-- KEYS[1]  the tenant's buckets, as in reserve.lua
-- ARGV     now in µs or "", the limit's name, a minute's allowance, delta (negative: a refund)
-- reply    the level, as text
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end
local name, burst, delta = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local rate = burst / 60
local level = burst
local stored = redis.call('HMGET', KEYS[1], name .. ':level', name .. ':at')
if stored[1] then
    local passed_s = math.max(0, now - stored[2]) / 1000000
    level = math.min(burst, stored[1] + rate * passed_s)
end
level = math.min(burst, level - delta)
redis.call(
    'HSET', KEYS[1],
    name .. ':level', string.format('%.17g', level),
    name .. ':at', string.format('%.0f', now)
)
-- The other limit may need longer to fill than this one: never shorten the life of the hash.
local life_ms = rate > 0 and math.ceil((burst - level) / rate * 1000) + 1000 or 61000
if redis.call('PTTL', KEYS[1]) < life_ms then
    redis.call('PEXPIRE', KEYS[1], life_ms)
end
return string.format('%.17g', level)
