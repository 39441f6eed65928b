-- Take a name once: of two requests with it, the first has it until its time is up or it lets go.
--
-- KEYS[1]  the name
-- ARGV     who takes it, for how many seconds; 0 lets go of what one has
-- reply    who had it before, or "" if nobody
local held = redis.call('GET', KEYS[1]) or ''
if tonumber(ARGV[2]) == 0 then
    if held == ARGV[1] then
        redis.call('DEL', KEYS[1])
    end
elseif held == '' then
    redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
end
return held
