-- Take from every limit of one tenant, or from none.
--
-- KEYS[1]  the tenant's buckets: a hash of "<limit>:level" (quota tokens) and "<limit>:at" (µs)
-- ARGV[1]  now in µs; "" for this server's clock, which all gateways share
-- ARGV     then for each limit: its name, a minute's allowance, the cost
-- reply    {index of the limit that refuses, or 0; seconds until it would not; level of each…},
--          the numbers as text, because a reply cuts a number to its integer
--
-- The law is core/bucket.py's: level(t) = min(burst, level(t0) + rate * (t - t0)), with the burst
-- one minute's allowance and rate = burst / 60 s. A bucket nobody has touched is full, so one that
-- has had time to fill may be forgotten. A clock that steps back adds nothing; as the server's is
-- wall time, which may be set back by an hour, the bucket then goes on from the new time.
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end

local names, levels, costs = {}, {}, {}
local refuses, wait_s, full_s = 0, 0, 0
for i = 2, #ARGV, 3 do
    local name, burst, cost = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
    local rate = burst / 60
    local level = burst
    local stored = redis.call('HMGET', KEYS[1], name .. ':level', name .. ':at')
    if stored[1] then
        local passed_s = (now - stored[2]) / 1000000
        level = math.min(burst, stored[1] + rate * math.max(0, passed_s))
        if passed_s < 0 then
            redis.call('HSET', KEYS[1], name .. ':at', string.format('%.0f', now))
        end
    end
    if level < cost then
        -- to the next µs and one more: rounding must not make the wait a lie
        local needs_s = rate > 0 and math.ceil((cost - level) / rate * 1000000 + 1) / 1000000 or 0
        if refuses == 0 or needs_s > wait_s then
            refuses, wait_s = #names + 1, needs_s
        end
    end
    if rate > 0 then
        full_s = math.max(full_s, (burst - level + cost) / rate)
    end
    names[#names + 1], levels[#levels + 1], costs[#costs + 1] = name, level, cost
end

local reply = { tostring(refuses), string.format('%.17g', wait_s) }
local stored = {}
for i = 1, #names do
    if refuses == 0 then
        levels[i] = levels[i] - costs[i]
        stored[#stored + 1] = names[i] .. ':level'
        stored[#stored + 1] = string.format('%.17g', levels[i])
        stored[#stored + 1] = names[i] .. ':at'
        stored[#stored + 1] = string.format('%.0f', now)
    end
    reply[#reply + 1] = string.format('%.17g', levels[i])
end
if refuses == 0 then
    redis.call('HSET', KEYS[1], unpack(stored))
    redis.call('PEXPIRE', KEYS[1], math.ceil(full_s * 1000) + 1000)
end
return reply
