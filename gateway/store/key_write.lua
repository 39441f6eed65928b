-- Give a tenant one more key, if the tenant exists and has room for it.
--
-- KEYS[1]  hash of tenants
-- KEYS[2]  the registry's generation, and the channel's name
-- KEYS[3]  hash of keys: "<tenant>\n<key id>" -> json
-- ARGV     tenant, key id, json, most keys a tenant may have
-- reply    the new generation; 0: there is no such tenant; -1: it has its most keys already
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return 0
end
local owner, held = ARGV[1] .. '\n', 0
for _, field in ipairs(redis.call('HKEYS', KEYS[3])) do
    if string.sub(field, 1, #owner) == owner then
        held = held + 1
    end
end
if held >= tonumber(ARGV[4]) then
    return -1
end
redis.call('HSET', KEYS[3], owner .. ARGV[2], ARGV[3])
local generation = redis.call('INCR', KEYS[2])
redis.call('PUBLISH', KEYS[2], generation)
return generation
