-- Create or change a row of the registry, if its version is the one the caller saw.
--
-- KEYS[1]  hash of rows: id -> "<version> <json>"
-- KEYS[2]  the registry's generation: counts changes, and names the channel they are told on
-- KEYS[3]  stream of events
-- ARGV     id, json, expected version (0: it must not exist yet), event, most events kept
-- reply    the new version; 0: there is no such row; negative: minus the version it has
--
-- A version is the generation of the change, so it grows and never repeats, not even when a
-- row is deleted and made again.
local current = redis.call('HGET', KEYS[1], ARGV[1])
local version = current and tonumber(string.match(current, '^%d+')) or 0
if version ~= tonumber(ARGV[3]) then
    return -version
end
local generation = redis.call('INCR', KEYS[2])
redis.call('HSET', KEYS[1], ARGV[1], generation .. ' ' .. ARGV[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'event', ARGV[4])
redis.call('PUBLISH', KEYS[2], generation)
return generation
