// A caller that has only moe.proto: one layer over eight Forward streams, the same rows with ForwardStep, and two
// refusals. Reads its job as JSON from standard input and writes what it got as JSON.
'use strict';

const fs = require('fs');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const job = JSON.parse(fs.readFileSync(0, 'utf8'));
const definition = loader.loadSync('megamoe/v1/moe.proto', {
  includeDirs: [job.proto], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true,
});
const { MoELayer } = grpc.loadPackageDefinition(definition).megamoe.v1;
const plaintext = grpc.credentials.createInsecure();

const unary = (client, method, request) => new Promise((resolve, reject) => {
  const deadline = new Date(Date.now() + 15000);
  client[method](request, { deadline }, (error, reply) => (error ? reject(error) : resolve(reply)));
});

class Rank {
  constructor(address) {
    this.client = new MoELayer(address, plaintext);
    this.stream = this.client.Forward();
    this.waiting = new Map();
    this.nextId = 1;
    this.stream.on('data', (reply) => {
      this.waiting.get(reply.request_id)(reply);
      this.waiting.delete(reply.request_id);
    });
    this.stream.on('error', (error) => { if (error.code !== grpc.status.CANCELLED) throw error; });
  }

  ask(request) {
    const id = String(this.nextId++);
    return new Promise((resolve) => {
      this.waiting.set(id, resolve);
      this.stream.write({ request_id: id, ...request });
    });
  }

  close() {
    this.stream.end();
    this.client.close();
  }
}

function tensors(hidden, numTopk) {
  const parts = [
    Buffer.from(job.hidden_states),
    Buffer.from(Int32Array.from(job.topk_ids).buffer),
    Buffer.from(Float32Array.from(job.topk_weights).buffer),
  ];
  const n = job.num_rows;
  const describe = (name, dtype, width, offset) => ({ name, dtype, shape: [n, width], offset });
  return {
    payload: Buffer.concat(parts),
    tensors: [
      describe('hidden_states', 'bfloat16', hidden, 0),
      describe('topk_ids', 'int32', numTopk, parts[0].length),
      describe('topk_weights', 'float32', numTopk, parts[0].length + parts[1].length),
    ],
  };
}

function rowsOf(result, payload) {
  const [tensor] = result.tensors;
  const start = Number(tensor.offset);
  const numBytes = tensor.shape.reduce((a, b) => a * Number(b), 2);
  return { path: result.sub_steps[0].path, rows: [...payload.subarray(start, start + numBytes)] };
}

async function main() {
  const front = new MoELayer(job.front, plaintext);
  const info = await unary(front, 'GetInfo', {});
  const { hidden, num_topk: numTopk, num_ranks: numRanks } = info.shape;
  const { payload, tensors: described } = tensors(hidden, numTopk);

  const ranks = info.ranks.map((rank) => new Rank(rank.address));
  const all = (make) => Promise.all(ranks.map((rank, i) => rank.ask(make(i))));
  const [{ lease_granted: lease }] = await all(() => ({ lease: { holder: 'node' } }));
  const common = {
    lease_serial: lease.lease_serial,
    plan_id: { generation: lease.generation, step_id: lease.next_step_id, micro_batch_idx: 0 },
  };
  const counts = ranks.map((_, i) => (i === 0 ? job.num_rows : 0));
  await all((i) => ({
    step_intent: { ...common, num_rows: counts[i], phase: counts[i] ? 'PHASE_decode' : 'PHASE_idle' },
  }));
  const results = await all((i) => ({
    layer_call: {
      ...common, layer_idx: job.layer_idx, sequence: lease.next_sequence, tensors: counts[i] ? described : [],
    },
    ...(counts[i] ? { payload } : {}),
  }));
  const stream = rowsOf(results[0].layer_result, results[0].payload);

  const step = (layerIdx) => unary(front, 'ForwardStep', {
    layer_idx: layerIdx, ranks: [{ rank: 0, phase: 'PHASE_decode', tensors: described }], payload,
  });
  const refused = await step(job.layer_idx).then(() => null, (error) => ({ code: error.code, details: error.details }));
  await all(() => ({ lease: { holder: 'node', release: true, lease_serial: lease.lease_serial } }));
  ranks.forEach((rank) => rank.close());

  const reply = await step(job.layer_idx);
  const one = rowsOf(reply.ranks[0].result, reply.payload);
  const wrongLayer = await step(1000).then(() => '', (error) => error.details);
  front.close();
  process.stdout.write(JSON.stringify({
    info: { hidden, num_ranks: numRanks }, stream, unary: one, refused, wrong_layer: wrongLayer,
  }));
}

main().catch((error) => { console.error(error); process.exit(1); });
