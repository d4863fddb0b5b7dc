-- Puts batches of usage into the stream of usage, each once, and tells what became of those that were sent before.
--
--   KEYS[1]  the stream of usage
--   ARGV[1]  maximum entries of the stream
--   ARGV[2+] for each batch: its name, and the batch; empty: it is only asked about
-- Result: entries of the stream, entries set aside, then for each batch: 0: Redis does not have it, and it is to be sent
-- with its content; 1: it is in the stream; 2: it is committed, and forgotten here; 3: the stream is full
--
-- Keeps: a batch is in the stream if `batches_key` has "sent" for it; the ledger's writer takes both away together.
-- Running it twice does no harm: a batch that was forgotten is sent again, and the ledger counts its records once.
local num_entries = redis.call("XLEN", KEYS[1])
local is_empty = num_entries == 0 -- somebody deleted the stream: what was "sent" is not there any more
local states = {}

for i = 2, #ARGV, 2 do
  local name, batch = ARGV[i], ARGV[i + 1]
  local known = redis.call("HGET", batches_key, name)
  if known == "sent" and not is_empty then
    states[#states + 1] = 1
  elseif known and known ~= "sent" then
    redis.call("HDEL", batches_key, name)
    states[#states + 1] = 2
  elseif batch == "" then
    states[#states + 1] = 0
  elseif num_entries >= tonumber(ARGV[1]) then
    states[#states + 1] = 3
  else
    redis.call("XADD", KEYS[1], "*", "name", name, "batch", batch)
    redis.call("HSET", batches_key, name, "sent")
    num_entries = num_entries + 1
    states[#states + 1] = 1
  end
end
return {num_entries, redis.call("XLEN", set_aside_key), unpack(states)}
