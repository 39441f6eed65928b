-- Delete a row of the registry, if its version is the one the caller saw.
--
-- KEYS[1]  hash of rows: id -> "<version> <json>"
-- KEYS[2]  the registry's generation, and the channel's name
-- KEYS[3]  stream of events
-- ARGV     id, expected version (0: any), event, most events kept
-- reply    the new generation; 0: there is no such row; negative: minus the version it has
local current = redis.call('HGET', KEYS[1], ARGV[1])
if not current then
    return 0
end
local version = tonumber(string.match(current, '^%d+'))
if ARGV[2] ~= '0' and version ~= tonumber(ARGV[2]) then
    return -version
end
redis.call('HDEL', KEYS[1], ARGV[1])
local generation = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[4], '*', 'event', ARGV[3])
redis.call('PUBLISH', KEYS[2], generation)
return generation
