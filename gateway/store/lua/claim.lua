-- Makes a full lease of a grant.
--
--   ARGV[4]  id of the granted ticket
--   ARGV[5]  lifetime of the lease, ms
-- Result: {"lease", fence, worker, boot, address, how often the ticket was overtaken} | {"waiting"} (no grant, or it
--   came too late)
--
-- Keeps: an expired grant is never claimed: its ticket waits at its old place. Claiming twice is as claiming once.
local id, lease_ttl = ARGV[4], tonumber(ARGV[5])

local lease = redis.call("HMGET", lease_key(id), "gateway", "worker")
if not lease[1] or lease[1] ~= GATEWAY then return {"waiting"} end
local worker = lease[2]
local expiry = tonumber(redis.call("ZSCORE", worker_leases_key(worker), id) or 0)
if expiry <= now then
  lease_drop(worker, id)
  grant({worker})
  return {"waiting"}
end
local overtaken, reply = grant_claim(worker, id, lease_ttl), lease_reply(id)
reply[#reply + 1] = overtaken
return reply
