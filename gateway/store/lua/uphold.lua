-- Keeps the record of a worker alive that can't renew it itself, for a gateway that hears the worker.
--
--   KEYS[1]  the worker's record
--   KEYS[2]  the model's workers
--   ARGV[1]  lifetime of a record, ms
--   ARGV[2]  id of the worker
--   ARGV[3]  "1": the record is written anew if it is gone; otherwise ""
--   ARGV[4]  the record's field `beat`, as the gateway last read it
--   ARGV[5]  its field `seal`
--   ARGV[6]  its field `placing`, without the KV cells that the worker used when it last wrote: nobody knows them now
-- Result: 1, or 0: nothing was done, as the record is gone or another one
--
-- Keeps: what a worker writes itself, a successor of its id included, is never changed.
local record, workers = unpack(KEYS)
local beat = redis.pcall("HGET", record, "beat")
if type(beat) == "table" then return 0 end -- of another type
if beat then
  if beat ~= ARGV[4] then return 0 end
  redis.call("HSET", record, "placing", ARGV[6])
else
  if ARGV[3] ~= "1" then return 0 end
  redis.call("HSET", record, "beat", ARGV[4], "seal", ARGV[5], "placing", ARGV[6])
  redis.call("SADD", workers, ARGV[2])
end
redis.call("PEXPIRE", record, ARGV[1])
return 1
