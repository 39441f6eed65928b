-- Take from every limit of one tenant, or from none; for each of several requests, in order.
--
-- KEYS     what the limits name by their index; rates are all in KEYS[1], and come first
-- ARGV[1]  now in µs; "" for this server's clock, which all gateways share
-- ARGV[2]  how many limits; then for each five words:
--            kind   rate: a hash of "<field>:level" (quota tokens) and "<field>:at" (µs)
--                   budget: a hash of "<field>", what is spent in its window
--                   lease: a sorted set of requests by when their lease ends (µs)
--            index of its key, field, allowance (of a minute, of the window, at once),
--            and in µs: when the window ends, how long a lease lives; 0 of a rate
-- ARGV     then for each request: its id, and its cost for each limit
-- reply    for each request: index of the limit that refuses, or 0; seconds until it would not;
--          level of each limit; the numbers as text, because a reply cuts a number to its integer
--
-- A rate's law is core/bucket.py's: level(t) = min(burst, level(t0) + rate * (t - t0)), with the
-- burst one minute's allowance and rate = burst / 60 s. A bucket nobody has touched is full, so one
-- that has had time to fill may be forgotten. A clock that steps back adds nothing; as the server's
-- is wall time, which may be set back by an hour, the bucket then goes on from the new time.
-- A budget admits while anything is left of it, and takes the whole estimate: it passes its limit by
-- one request at most, and two that come together cannot both have the rest.
-- The requests of one call are decided at one time, one after the other, each as if alone.
local FREE_AGAIN_S = 1 -- nobody knows when a running request ends: ask again soon

local now = tonumber(ARGV[1])
if not now then
    local time = redis.call('TIME')
    now = time[1] * 1000000 + time[2]
end

local count, rates = tonumber(ARGV[2]), 0
local kinds, keys, names, limits, untils, levels, spent = {}, {}, {}, {}, {}, {}, {}
local fields = {}
for i = 1, count do
    local at = 5 * i - 2
    kinds[i], keys[i], names[i] = ARGV[at], KEYS[tonumber(ARGV[at + 1])], ARGV[at + 2]
    limits[i], untils[i], spent[i] = tonumber(ARGV[at + 3]), tonumber(ARGV[at + 4]), 0
    if kinds[i] == 'rate' then
        rates = i
        fields[2 * i - 1], fields[2 * i] = names[i] .. ':level', names[i] .. ':at'
    elseif kinds[i] == 'budget' then
        levels[i] = limits[i] - (tonumber(redis.call('HGET', keys[i], names[i])) or 0)
    else
        redis.call('ZREMRANGEBYSCORE', keys[i], '-inf', string.format('%.0f', now))
        levels[i] = limits[i] - redis.call('ZCARD', keys[i])
    end
end

local stepped_back = false
if rates > 0 then
    local stored = redis.call('HMGET', KEYS[1], unpack(fields))
    for i = 1, rates do
        levels[i] = limits[i]
        if stored[2 * i - 1] then
            local passed_s = (now - stored[2 * i]) / 1000000
            stepped_back = stepped_back or passed_s < 0
            levels[i] = math.min(
                limits[i], stored[2 * i - 1] + limits[i] / 60 * math.max(0, passed_s))
        end
    end
end

local reply, taken, admitted = {}, false, {}
for first = 5 * count + 3, #ARGV, count + 1 do
    local refuses, wait_s, costs = 0, 0, {}
    for i = 1, count do
        local cost, needs_s = tonumber(ARGV[first + i]), nil
        costs[i] = cost
        if kinds[i] == 'rate' then
            local short, rate = cost - levels[i], limits[i] / 60
            if short > 0 then
                -- to the next µs and one more: rounding must not make the wait a lie
                needs_s = rate > 0 and math.ceil(short / rate * 1000000 + 1) / 1000000 or 0
            end
        elseif kinds[i] == 'budget' then
            if cost > 0 and levels[i] <= 0 then
                needs_s = math.max(0, untils[i] - now) / 1000000
            end
        elseif cost > levels[i] and cost > 0 then
            needs_s = FREE_AGAIN_S
        end
        if needs_s and (refuses == 0 or needs_s > wait_s) then
            refuses, wait_s = i, needs_s
        end
    end
    reply[#reply + 1] = tostring(refuses)
    reply[#reply + 1] = wait_s > 0 and string.format('%.17g', wait_s) or '0'
    if refuses == 0 and ARGV[first] ~= '' then -- without an id it only looks
        admitted[#admitted + 1] = ARGV[first]
    end
    for i = 1, count do
        if refuses == 0 then
            levels[i], spent[i], taken = levels[i] - costs[i], spent[i] + costs[i], true
        end
        reply[#reply + 1] = string.format('%.17g', levels[i])
    end
end

if rates > 0 and (taken or stepped_back) then
    local written, full_s, now_text = {}, 0, string.format('%.0f', now)
    for i = 1, rates do
        written[4 * i - 3], written[4 * i - 2] = fields[2 * i - 1], string.format('%.17g', levels[i])
        written[4 * i - 1], written[4 * i] = fields[2 * i], now_text
        if limits[i] > 0 then
            full_s = math.max(full_s, (limits[i] - levels[i]) / limits[i] * 60)
        end
    end
    redis.call('HSET', KEYS[1], unpack(written))
    -- a limit that is not of this call may need longer: never shorten the life of the hash
    local life_ms = math.ceil(full_s * 1000) + 1000
    if redis.call('PTTL', KEYS[1]) < life_ms then
        redis.call('PEXPIRE', KEYS[1], life_ms)
    end
end
for i = rates + 1, count do
    if kinds[i] == 'budget' and spent[i] > 0 then
        redis.call('HINCRBY', keys[i], names[i], string.format('%.0f', spent[i]))
        redis.call('PEXPIREAT', keys[i], string.format('%.0f', untils[i] / 1000 + 86400000))
    elseif kinds[i] == 'lease' and spent[i] > 0 then
        for _, request in ipairs(admitted) do
            redis.call('ZADD', keys[i], string.format('%.0f', now + untils[i]), request)
        end
        redis.call('PEXPIRE', keys[i], string.format('%.0f', untils[i] / 1000 + 1000))
    end
end
return reply
