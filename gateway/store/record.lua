-- Enter finished requests of one hour in the ledger; all of them, or none if one is there already.
--
-- KEYS[1]  stream of records
-- KEYS[2]  hash of the requests of that hour that were entered
-- KEYS     then hashes of sums: of the hour in which the requests finished, and of each life of a
--          replica that served some of them
-- ARGV     life of [2] (s), most records in the stream, life of the sums (s), how many requests,
--          then the ids of the requests, their records, and by threes: index of a key, field,
--          increment
-- reply    1 if entered now, 0 if one was known: then try them one by one
--
-- That they were entered is noted last: should a write before fail, nothing is lost but tried again.
local count = tonumber(ARGV[4])
local ids, noted = {}, {}
for i = 1, count do
    ids[i], noted[2 * i - 1], noted[2 * i] = ARGV[4 + i], ARGV[4 + i], '1'
end
for _, known in ipairs(redis.call('HMGET', KEYS[2], unpack(ids))) do
    if known then
        return 0
    end
end
for i = 5 + count, 4 + 2 * count do
    redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'record', ARGV[i])
end
for i = 5 + 2 * count, #ARGV, 3 do
    redis.call('HINCRBY', KEYS[tonumber(ARGV[i])], ARGV[i + 1], ARGV[i + 2])
end
for i = 3, #KEYS do
    redis.call('EXPIRE', KEYS[i], ARGV[3])
end
redis.call('HSET', KEYS[2], unpack(noted))
redis.call('EXPIRE', KEYS[2], ARGV[1])
return 1
