-- Revoke one key of one tenant.
--
-- KEYS[1]  the registry's generation, and the channel's name
-- KEYS[2]  hash of keys: "<tenant>\n<key id>" -> json
-- ARGV     tenant, key id
-- reply    the new generation; 0: there is no such key
if redis.call('HDEL', KEYS[2], ARGV[1] .. '\n' .. ARGV[2]) == 0 then
    return 0
end
local generation = redis.call('INCR', KEYS[1])
redis.call('PUBLISH', KEYS[1], generation)
return generation
