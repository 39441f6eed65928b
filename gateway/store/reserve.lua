-- Take from every limit of one tenant, or from none; for each of several requests, in order.
--
-- KEYS[1]  the tenant's buckets: a hash of "<limit>:level" (quota tokens) and "<limit>:at" (µs)
-- ARGV[1]  now in µs; "" for this server's clock, which all gateways share
-- ARGV     then for each limit: its name (no number), a minute's allowance, the first request's
--          cost; then the costs of the second request, one for each limit, and so on
-- reply    for each request: index of the limit that refuses, or 0; seconds until it would not;
--          level of each limit; the numbers as text, because a reply cuts a number to its integer
--
-- The law is core/bucket.py's: level(t) = min(burst, level(t0) + rate * (t - t0)), with the burst
-- one minute's allowance and rate = burst / 60 s. A bucket nobody has touched is full, so one that
-- has had time to fill may be forgotten. A clock that steps back adds nothing; as the server's is
-- wall time, which may be set back by an hour, the bucket then goes on from the new time.
-- The requests of one call are decided at one time, one after the other, each as if alone.
local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end

local names, bursts, costs, levels = {}, {}, {}, {}
local at = 2
while ARGV[at] and not tonumber(ARGV[at]) do
    names[#names + 1] = ARGV[at]
    bursts[#bursts + 1] = tonumber(ARGV[at + 1])
    costs[#costs + 1] = tonumber(ARGV[at + 2])
    at = at + 3
end
local count = #names
for i = at, #ARGV do
    costs[#costs + 1] = tonumber(ARGV[i])
end

local fields = {}
for i = 1, count do
    fields[2 * i - 1], fields[2 * i] = names[i] .. ':level', names[i] .. ':at'
end
local stored = redis.call('HMGET', KEYS[1], unpack(fields))
local stepped_back = false
for i = 1, count do
    levels[i] = bursts[i]
    if stored[2 * i - 1] then
        local passed_s = (now - stored[2 * i]) / 1000000
        stepped_back = stepped_back or passed_s < 0
        levels[i] = math.min(
            bursts[i], stored[2 * i - 1] + bursts[i] / 60 * math.max(0, passed_s))
    end
end

local reply, taken = {}, false
for first = 0, #costs - 1, count do
    local refuses, wait_s = 0, 0
    for i = 1, count do
        local short, rate = costs[first + i] - levels[i], bursts[i] / 60
        if short > 0 then
            -- to the next µs and one more: rounding must not make the wait a lie
            local needs_s = rate > 0 and math.ceil(short / rate * 1000000 + 1) / 1000000 or 0
            if refuses == 0 or needs_s > wait_s then
                refuses, wait_s = i, needs_s
            end
        end
    end
    reply[#reply + 1] = tostring(refuses)
    reply[#reply + 1] = wait_s > 0 and string.format('%.17g', wait_s) or '0'
    for i = 1, count do
        if refuses == 0 then
            levels[i], taken = levels[i] - costs[first + i], true
        end
        reply[#reply + 1] = string.format('%.17g', levels[i])
    end
end

if taken or stepped_back then
    local written, full_s, now_text = {}, 0, string.format('%.0f', now)
    for i = 1, count do
        written[4 * i - 3], written[4 * i - 2] = fields[2 * i - 1], string.format('%.17g', levels[i])
        written[4 * i - 1], written[4 * i] = fields[2 * i], now_text
        if bursts[i] > 0 then
            full_s = math.max(full_s, (bursts[i] - levels[i]) / bursts[i] * 60)
        end
    end
    redis.call('HSET', KEYS[1], unpack(written))
    redis.call('PEXPIRE', KEYS[1], math.ceil(full_s * 1000) + 1000)
end
return reply
