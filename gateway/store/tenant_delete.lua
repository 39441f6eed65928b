-- Delete a tenant with its keys and its buckets, if its version is the one the caller saw.
--
-- KEYS[1]  hash of tenants: id -> "<version> <json>"
-- KEYS[2]  the registry's generation, and the channel's name
-- KEYS[3]  stream of events
-- KEYS[4]  hash of keys: "<tenant>\n<key id>" -> json
-- KEYS[5]  the tenant's buckets
-- ARGV     id, expected version (0: any), event, most events kept
-- reply    the new generation; 0: there is no such tenant; negative: minus the version it has
local current = redis.call('HGET', KEYS[1], ARGV[1])
if not current then
    return 0
end
local version = tonumber(string.match(current, '^%d+'))
if ARGV[2] ~= '0' and version ~= tonumber(ARGV[2]) then
    return -version
end
local owner = ARGV[1] .. '\n'
for _, field in ipairs(redis.call('HKEYS', KEYS[4])) do
    if string.sub(field, 1, #owner) == owner then
        redis.call('HDEL', KEYS[4], field)
    end
end
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[5])
local generation = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'event', ARGV[3])
redis.call('PUBLISH', KEYS[2], generation)
return generation
