// HTTP with noise in both directions, every answer checked by its hash.
//   web.js serve HOST [PORT]   prints "port N"
//   web.js call HOST PORT SECONDS CONNECTIONS FILE   prints "result {...}", ends when FILE exists
//   web.js cluster HOST [PORT] the same as serve, by two workers of the cluster module
//   web.js load HOST PORT DIR  as packaged.sh
const http = require('http'), crypto = require('crypto'), fs = require('fs');
const digest = (b) => crypto.createHash('sha256').update(b).digest('hex');
const [what, host, port, seconds, conns, file] = process.argv.slice(2);
const cluster = what === 'cluster' && require('cluster');
if (cluster && cluster.isPrimary) {
  let ready = 0;
  cluster.on('listening', (w, a) => { if (++ready === 2) console.log('port', a.port); });
  cluster.fork();
  cluster.fork();
} else if (what === 'serve' || cluster) {
  const s = http.createServer((q, r) => {
    const parts = [];
    q.on('data', (d) => parts.push(d));
    q.on('end', () => {
      const body = Buffer.concat(parts);
      r.writeHead(200, { 'x-digest': digest(body), 'content-length': body.length });
      r.end(body);
    });
  });
  s.keepAliveTimeout = 60000;
  s.listen(+port || 0, host, () => { if (!cluster) console.log('port', s.address().port); });
} else {
  const connections = +conns || 8;
  const agent = new http.Agent({ keepAlive: true, maxSockets: connections });
  const begin = Date.now(), load = what === 'load', dir = seconds;
  const over = () => (load ? fs.existsSync(dir + '/stop') : Date.now() > begin + 1000 * seconds);
  let requests = 0, bytes = 0, open = 0;
  const one = () => {
    if (over()) { if (--open === 0) done(); return; }
    const body = crypto.randomBytes([10, 100, 1000, 20000, 300000][requests % 5 === 4 && requests % 50 ? 2 : requests % 5]);
    const q = http.request({ host, port, agent, method: 'POST' }, (r) => {
      const parts = [];
      r.on('data', (d) => parts.push(d));
      r.on('end', () => {
        const back = Buffer.concat(parts);
        if (!back.equals(body) || r.headers['x-digest'] !== digest(body)) { console.log('BYTES DIFFER'); process.exit(1); }
        requests++; bytes += 2 * body.length; one();
      });
    });
    q.on('error', (e) => { console.log('failed', e); process.exit(1); });
    q.end(body);
  };
  const done = () => {
    if (load) {
      console.log('rate', Math.round(requests * 1000 / (Date.now() - begin)), 'requests/s\nok');
      agent.destroy();
      return;
    }
    console.log('result', JSON.stringify({ requests, bytes, version: process.version }));
    const t = setInterval(() => { if (!file || fs.existsSync(file)) { clearInterval(t); agent.destroy(); } }, 10);
  };
  if (load) fs.writeFileSync(dir + '/begun', '');
  for (let k = 0; k < connections; k++) { open++; one(); }
}
