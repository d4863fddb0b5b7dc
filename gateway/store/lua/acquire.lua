-- Takes the first free slot of the ranked workers, or files a ticket.
--
--   ARGV[4]   id of the lease or ticket, new for each call
--   ARGV[5]   channel that grants to this gateway are published on
--   ARGV[6]   lifetime of the lease, ms
--   ARGV[7]   lifetime of the ticket, ms
--   ARGV[8]   most tickets that may wait
--   ARGV[9]   JSON array of workers to avoid, or empty
--   ARGV[10+] workers, best first
-- Result: {"lease", fence, worker, boot, address, leases of that worker} | {"queued", arrival} | {"full", waiting}
--
-- Keeps: no worker has more leases than slots; nobody overtakes a waiting ticket that could have had the slot.
-- Running it twice with one id is running it once.
local id, channel, lease_ttl, ticket_ttl = ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])

local ticket_arrival = redis.call("HGET", ticket_key(id), "arrival")
if ticket_arrival then return {"queued", tonumber(ticket_arrival)} end
if redis.call("EXISTS", lease_key(id)) == 1 then return lease_reply(id) end

local waiting = redis.call("ZCARD", queue_key)
if waiting == 0 and not settling() then
  for i = 10, #ARGV do
    local free, record = slots_free(ARGV[i])
    if free > 0 then
      local fence = lease_take(ARGV[i], record, id, GATEWAY, lease_ttl)
      return {"lease", fence, ARGV[i], record.boot, record.address, record.slots - free + 1}
    end
  end
end

if waiting >= tonumber(ARGV[8]) then
  -- Dead tickets must not make the line look full.
  for _, dead in ipairs(redis.call("ZRANGEBYSCORE", tickets_key, "-inf", now)) do
    if redis.call("ZSCORE", queue_key, dead) then ticket_drop(dead) end
  end
  waiting = redis.call("ZCARD", queue_key)
  if waiting >= tonumber(ARGV[8]) then return {"full", waiting} end
end

local arrival = redis.call("INCR", arrivals_key)
ticket_file(id, channel, arrival, ticket_ttl, ARGV[9])
-- Those who wait may all avoid a worker that this call can use, and this gateway may not know every worker yet.
grant_all()
local worker = redis.call("HGET", lease_key(id), "worker")
if not worker then return {"queued", arrival} end
grant_claim(worker, id, lease_ttl)
return lease_reply(id)
