-- Correct one budget of one tenant by actual minus reserved. Nobody is asked: it may be overspent.
--
-- KEYS[1]  the window's hash, as in reserve.lua
-- ARGV     field, delta (negative: a refund), when the window ends (µs)
-- reply    what is spent
--
-- The hash outlives its window by a day, for what ends after midnight.
local spent = redis.call('HINCRBY', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', ARGV[3] / 1000 + 86400000))
return spent
