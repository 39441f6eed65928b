-- Enter one finished request in the ledger, or do nothing if it is there.
--
-- KEYS[1]  the request's mark: it was entered
-- KEYS[2]  stream of records
-- KEYS[3]  hash of sums for the hour in which the request finished
-- ARGV     life of the mark (s), most records in the stream, life of the hour (s), the record,
--          then pairs of field and increment
-- reply    1 if entered now, 0 if it was known
--
-- The mark is set last: should a write before it fail, the request is not lost but tried again.
if redis.call('EXISTS', KEYS[1]) == 1 then
    return 0
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'record', ARGV[4])
for i = 5, #ARGV, 2 do
    redis.call('HINCRBY', KEYS[3], ARGV[i], ARGV[i + 1])
end
redis.call('EXPIRE', KEYS[3], ARGV[3])
redis.call('SET', KEYS[1], '1', 'EX', ARGV[1])
return 1
