-- Give a tenant one more key, if the tenant exists and has room; perhaps in place of another.
--
-- KEYS[1]  hash of tenants
-- KEYS[2]  the registry's generation, and the channel's name
-- KEYS[3]  stream of events
-- KEYS[4]  hash of keys: "<tenant>\n<key id>" -> json
-- ARGV     tenant, key id, json, event, most events kept, most keys a tenant may have,
--          the key it comes in place of or "", and that key's new json, or "" to end it at once
-- reply    the new generation; 0: there is no such tenant; -1: it has its most keys already;
--          -2: there is no such key to replace
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return 0
end
local owner, held = ARGV[1] .. '\n', 0
for _, field in ipairs(redis.call('HKEYS', KEYS[4])) do
    if string.sub(field, 1, #owner) == owner then
        held = held + 1
    end
end
local replaced = ARGV[7]
if replaced ~= '' and redis.call('HEXISTS', KEYS[4], owner .. replaced) == 0 then
    return -2
end
if held >= tonumber(ARGV[6]) and (replaced == '' or ARGV[8] ~= '') then
    return -1
end
if replaced ~= '' and ARGV[8] == '' then
    redis.call('HDEL', KEYS[4], owner .. replaced)
elseif replaced ~= '' then
    redis.call('HSET', KEYS[4], owner .. replaced, ARGV[8])
end
redis.call('HSET', KEYS[4], owner .. ARGV[2], ARGV[3])
local generation = redis.call('INCR', KEYS[2])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[5], '*', 'event', ARGV[4])
redis.call('PUBLISH', KEYS[2], generation)
return generation
