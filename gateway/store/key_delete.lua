-- Revoke one key of one tenant.
--
-- KEYS[1]  the registry's generation, and the channel's name
-- KEYS[2]  stream of events
-- KEYS[3]  hash of keys: "<tenant>\n<key id>" -> json
-- ARGV     tenant, key id, event, most events kept
-- reply    the new generation; 0: there is no such key
if redis.call('HDEL', KEYS[3], ARGV[1] .. '\n' .. ARGV[2]) == 0 then
    return 0
end
local generation = redis.call('INCR', KEYS[1])
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[4], '*', 'event', ARGV[3])
redis.call('PUBLISH', KEYS[1], generation)
return generation
