-- Forget a replica that announced itself and whose lease has ended; say so once, whoever else asks.
--
-- KEYS[1]  the hash of join.lua
-- KEYS[2]  stream of events
-- ARGV     name, event, most events kept
-- reply    1: it was forgotten; 0: it is on the list again, or was forgotten before
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local held = redis.call('HGET', KEYS[1], ARGV[1])
if not held or tonumber(string.match(held, '^%d+')) > now then
    return 0
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[3], '*', 'event', ARGV[2])
return 1
