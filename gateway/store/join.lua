-- Join the list of replicas that announce themselves, renew a place on it, or give it up.
--
-- KEYS[1]  hash of replicas: name -> "<when its lease ends, in µs> <url> <entry>"
-- KEYS[2]  stream of events
-- ARGV     name, url, entry ("" gives the place up), how long the lease is (µs), most replicas,
--          event, most events kept
-- reply    "" when it is done; "full"; or "<url> <µs>": who has the name, and for how long yet
--
-- A name whose lease runs belongs to the url that took it. The event is written when the list says
-- something else than before: not when a place is renewed, nor when one is given up that is none.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local held = redis.call('HGET', KEYS[1], ARGV[1])
local before = ''
if held then
    local ends, url = string.match(held, '^(%d+) (%S+) ')
    if url ~= ARGV[2] and tonumber(ends) > now then
        return string.format('%s %.0f', url, ends - now)
    end
    before = string.match(held, '^%d+ (.*)$')
end
local after = ''
if ARGV[3] == '' then
    redis.call('HDEL', KEYS[1], ARGV[1])
elseif not held and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[5]) then
    return 'full'
else
    after = ARGV[2] .. ' ' .. ARGV[3]
    redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now + ARGV[4], after))
end
if after ~= before then
    redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[7], '*', 'event', ARGV[6])
end
return ''
