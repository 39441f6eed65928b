-- Have a name to oneself, for as long as one keeps asking: the first to ask has it.
--
-- KEYS[1]  the name
-- ARGV     who asks, and for how many milliseconds from now; 0 lets go of what one has
-- reply    1 when it is theirs now, else 0
local held = redis.call('GET', KEYS[1])
if tonumber(ARGV[2]) == 0 then
    if held == ARGV[1] then
        redis.call('DEL', KEYS[1])
    end
    return 0
elseif held and held ~= ARGV[1] then
    return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
