//! Lag of HTTP and exec probes, on an idle and on a busy machine, and the evaluations that watchers receive.
//!
//! The HTTP server and the runtime in memory are in this process, and record the arrival of each attempt. The
//! client of pod-sync shares the pods among the instances of probe-service.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use parking_lot::Mutex;
use pod_sync_clients::Probes;
use quintlet_e2e::service::Service;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::grant::GrantKey;
use quintlet_kit::{socket, task};
use quintlet_model::ids::PodUid;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::probe_spec::Handler;
use quintlet_proto::probe::v1::watch_event::Event;
use quintlet_proto::probe::v1::{self as wire, ProbeType};
use quintlet_testkit::fake_runtime::{ContainerSeed, ExecReply, FakeRuntime, Options};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::measure::{Usage, delays, usage};
use crate::{LIMIT, command, now, pid, service};

/// Timeout of all probes in seconds.
const TIMEOUT: u32 = 1;

/// Arrivals of the attempts of each probe, in CLOCK_BOOTTIME nanoseconds.
type Arrivals = Arc<Vec<Mutex<Vec<u64>>>>;

/// The probes that are measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbeArgs {
    /// Number of HTTP probes.
    pub(crate) http: usize,
    pub(crate) http_period: Duration,
    /// Number of exec probes.
    pub(crate) exec: usize,
    pub(crate) exec_period: Duration,
    /// Instances of probe-service.
    pub(crate) instances: usize,
    /// Processes that compute for all of their time, beside the second measurement.
    pub(crate) busy: usize,
    /// Watchers of the evaluations.
    pub(crate) watchers: usize,
    /// Time of each of the two measurements.
    pub(crate) span: Duration,
}

/// Measures probes on the machine as it is, and beside busy processes.
pub(crate) async fn measured(args: ProbeArgs) -> anyhow::Result<Value> {
    ensure!(args.instances > 0, "no instance of probe-service");
    let dir = tempfile::tempdir()?;
    let run = dir.path().join("run");
    let http = Group::new(args.http, args.http_period);
    let exec = Group::new(args.exec, args.exec_period);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let server = task::spawn("server", accept(listener, Arc::clone(&http.arrivals)));
    let mut targets: Vec<wire::PodTarget> =
        (0..args.http).map(|i| http_target(i, port, args.http_period)).collect::<anyhow::Result<_>>()?;

    let runtime_socket = dir.path().join("runtime.sock");
    let runtime = FakeRuntime::start(&runtime_socket, Options::default())?;
    record_execs(&runtime, &exec.arrivals);
    let endpoint = format!("unix://{}", runtime_socket.display());
    let mut proxy = service(dir.path(), "cri-proxy", &["--runtime-endpoint", &endpoint]);
    socket::wait_ready(&Paths::new(&run).cri(CriSocket::Read), LIMIT).await?;
    let key = GrantKey::load_or_create(&Paths::new(&run).grant_key())?;
    for i in 0..args.exec {
        targets.push(exec_target(i, &runtime, &key, args.exec_period)?);
    }

    let mut probers: Vec<Service> = (0..args.instances).map(|id| prober(dir.path(), id)).collect();
    for id in 0..args.instances {
        socket::wait_ready(&Paths::new(&run).probe(&id.to_string()), LIMIT).await?;
    }
    let driver = Driver::start(&run, targets)?;
    // Until each probe has its place within the period.
    for group in [&http, &exec] {
        group.wait_for_all().await?;
    }
    let received = Watchers::open(&run, args).await?;
    let node = Measured { http: &http, exec: &exec, probers: pids(&probers)?, proxy: pid(&proxy)? };
    let quiet = node.observe(args.span).await?;
    let busy: Vec<Busy> = (0..args.busy).map(|_| Busy::start()).collect::<anyhow::Result<_>>()?;
    let loaded = if args.busy == 0 { Value::Null } else { node.observe(args.span).await? };
    drop(busy);
    ensure!(probers.iter().all(|prober| prober.process().starts == 1), "an instance of probe-service ended");
    let report = json!({
        "probes": args.http,
        "period_ms": args.http_period.as_secs_f64() * 1000.0,
        "exec_probes": args.exec,
        "exec_period_ms": args.exec_period.as_secs_f64() * 1000.0,
        "instances": args.instances,
        "busy_processes": args.busy,
        "seconds": args.span.as_secs(),
        "idle_machine": quiet,
        "beside_busy_processes": loaded,
        "failures": driver.failures.load(Ordering::Relaxed),
        "watchers": received.report(),
    });
    drop(driver);
    server.abort();
    for prober in &mut probers {
        prober.terminate().await;
    }
    proxy.terminate().await;
    Ok(report)
}

/// Starts an instance of probe-service, whose log has its number.
fn prober(dir: &Path, id: usize) -> Service {
    let mut command = command(dir, "probe-service", &["--id", &id.to_string()]);
    command.log = dir.join(format!("probe-service-{id}.log"));
    Service::start(command)
}

fn pids(services: &[Service]) -> anyhow::Result<Vec<i32>> {
    services.iter().map(pid).collect()
}

/// Records the arrivals of exec probes. The second word of a command is the number of its probe.
fn record_execs(runtime: &FakeRuntime, arrivals: &Arrivals) {
    let arrivals = Arc::clone(arrivals);
    runtime.on_exec(move |_, command| {
        let at = now();
        let number = command.get(1).and_then(|number| number.parse::<usize>().ok());
        if let Some(of_probe) = number.and_then(|number| arrivals.get(number)) {
            of_probe.lock().push(at);
        }
        ExecReply::default()
    });
}

/// Probes with one kind of handler.
struct Group {
    period: Duration,
    arrivals: Arrivals,
}

impl Group {
    fn new(probes: usize, period: Duration) -> Self {
        Self { period, arrivals: Arc::new((0..probes).map(|_| Mutex::default()).collect()) }
    }

    async fn wait_for_all(&self) -> anyhow::Result<()> {
        let all = async {
            while self.arrivals.iter().any(|of_probe| of_probe.lock().len() < 2) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(LIMIT, all).await.context("not all probes run")
    }

    fn clear(&self) {
        for of_probe in self.arrivals.iter() {
            of_probe.lock().clear();
        }
    }

    /// Returns the lag of the attempts during `span`, and the number of attempts that came less than half a
    /// period after the previous one. The lag of an attempt is the difference between its distance from the
    /// previous one and the period. Of two instances that probe a pod, one attempt in a period is that close.
    fn figures(&self, span: Duration) -> anyhow::Result<Value> {
        let period = u64::try_from(self.period.as_nanos())?.max(1);
        let whole = u64::try_from(span.as_nanos())? / period;
        // One attempt may miss the span at its start, and another one at its end.
        let fewest = usize::try_from(whole)?.saturating_sub(2);
        let mut lags = Vec::new();
        let (mut attempts, mut twice) = (0, 0);
        for of_probe in self.arrivals.iter() {
            let mut times = of_probe.lock().clone();
            times.sort_unstable();
            ensure!(times.len() >= fewest, "a probe has stopped: {} attempts in {span:?}", times.len());
            attempts += times.len();
            let distances = times.windows(2).map(|pair| pair[1] - pair[0]);
            twice += distances.clone().filter(|distance| *distance < period / 2).count();
            lags.extend(distances.map(|distance| distance.abs_diff(period)));
        }
        Ok(json!({"lag_ms": delays(&lags), "attempts": attempts, "twice_in_a_period": twice}))
    }
}

/// Probes and processes that are measured.
struct Measured<'a> {
    http: &'a Group,
    exec: &'a Group,
    probers: Vec<i32>,
    proxy: i32,
}

impl Measured<'_> {
    /// Returns the figures of all probes, and the CPU of the services during `span`.
    async fn observe(&self, span: Duration) -> anyhow::Result<Value> {
        self.http.clear();
        self.exec.clear();
        let (probers, proxy) = (total(&self.probers)?, usage(self.proxy)?);
        tokio::time::sleep(span).await;
        let (probers_after, proxy_after) = (total(&self.probers)?, usage(self.proxy)?);
        let percent = |before: &Usage, after: &Usage| {
            (after.cpu_seconds - before.cpu_seconds) * 100.0 / span.as_secs_f64()
        };
        Ok(json!({
            "http": self.http.figures(span)?,
            "exec": self.exec.figures(span)?,
            "cpu_percent": percent(&probers, &probers_after),
            "pss_kib": probers_after.pss_kib,
            "cri_proxy_cpu_percent": percent(&proxy, &proxy_after),
        }))
    }
}

/// Returns the sum of the usage of processes.
fn total(pids: &[i32]) -> anyhow::Result<Usage> {
    let mut total = Usage { cpu_seconds: 0.0, pss_kib: 0 };
    for pid in pids {
        let usage = usage(*pid)?;
        total.cpu_seconds += usage.cpu_seconds;
        total.pss_kib += usage.pss_kib;
    }
    Ok(total)
}

async fn accept(listener: TcpListener, arrivals: Arrivals) {
    let mut connections = JoinSet::new();
    while let Ok((stream, _)) = listener.accept().await {
        let at = now();
        connections.spawn(reply(stream, Arc::clone(&arrivals), at));
        // The set keeps those that have ended until they are taken.
        while connections.try_join_next().is_some() {}
    }
}

/// Answers one request, whose path is the number of its probe.
async fn reply(mut stream: TcpStream, arrivals: Arrivals, at: u64) -> anyhow::Result<()> {
    let mut request = [0; 1024];
    let length = stream.read(&mut request).await?;
    let text = std::str::from_utf8(&request[..length])?;
    let number: usize = text.split_whitespace().nth(1).context("no path")?.trim_start_matches('/').parse()?;
    arrivals.get(number).context("no such probe")?.lock().push(at);
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await?;
    Ok(())
}

/// The client of pod-sync, with all targets.
struct Driver {
    failures: Arc<AtomicU64>,
    _stop: DropGuard,
}

impl Driver {
    fn start(run: &Path, targets: Vec<wire::PodTarget>) -> anyhow::Result<Self> {
        let (probes, mut failed) = Probes::new(Paths::new(run).probe_dir(), Arc::default());
        for target in targets {
            probes.set_target(&PodUid::parse(&target.uid)?, target)?;
        }
        let stop = CancellationToken::new();
        task::spawn("probes", probes.run(stop.clone()));
        let failures = Arc::<AtomicU64>::default();
        let count = Arc::clone(&failures);
        task::spawn("failures", async move {
            while failed.recv().await.is_some() {
                count.fetch_add(1, Ordering::Relaxed);
            }
        });
        Ok(Self { failures, _stop: stop.drop_guard() })
    }
}

fn http_target(i: usize, port: u16, period: Duration) -> anyhow::Result<wire::PodTarget> {
    let http = wire::HttpGet {
        scheme: "http".to_owned(),
        port: port.into(),
        path: format!("/{i}"),
        ..wire::HttpGet::default()
    };
    pod_target(&format!("http-{i}"), format!("container-{i}"), Handler::Http(http), period)
}

/// Adds a container to the runtime, and returns the target of its pod.
fn exec_target(
    i: usize,
    runtime: &FakeRuntime,
    key: &GrantKey,
    period: Duration,
) -> anyhow::Result<wire::PodTarget> {
    let name = format!("exec-{i}");
    let sandbox = runtime.add_sandbox(&name, &name, "default", 0);
    let container = runtime.add_container(&sandbox, &ContainerSeed::running("main"));
    let command = vec!["probe".to_owned(), i.to_string()];
    let grant = key.sign(&container, &command, TIMEOUT);
    pod_target(&name, container, Handler::Exec(wire::ExecCommand { command, grant }), period)
}

fn pod_target(
    name: &str,
    container_id: String,
    handler: Handler,
    period: Duration,
) -> anyhow::Result<wire::PodTarget> {
    let probe = wire::ProbeSpec {
        r#type: ProbeType::Readiness as i32,
        handler: Some(handler),
        period_seconds: u32::try_from(period.as_secs())?.max(1),
        period_ms: u32::try_from(period.as_millis())?,
        timeout_seconds: TIMEOUT,
        success_threshold: 1,
        failure_threshold: 3,
        ..wire::ProbeSpec::default()
    };
    Ok(wire::PodTarget {
        uid: name.to_owned(),
        name: name.to_owned(),
        namespace: "default".to_owned(),
        generation: 1,
        pod_ip: "127.0.0.1".to_owned(),
        containers: vec![wire::ContainerTarget {
            name: "main".to_owned(),
            container_id,
            running: true,
            started_boottime_ns: 1,
            started: true,
            probes: vec![probe],
        }],
    })
}

/// Clients of Watch, each with a connection of its own to each instance.
struct Watchers {
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Evaluations that each received, and those that the instances dropped for it.
    counts: Vec<Arc<[AtomicU64; 2]>>,
}

impl Drop for Watchers {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Watchers {
    async fn open(run: &Path, args: ProbeArgs) -> anyhow::Result<Self> {
        let mut watchers = Self { tasks: Vec::new(), counts: Vec::new() };
        for _ in 0..args.watchers {
            let counts = Arc::<[AtomicU64; 2]>::default();
            for id in 0..args.instances {
                watchers.tasks.push(watch(run, id, Arc::clone(&counts)).await?);
            }
            watchers.counts.push(counts);
        }
        Ok(watchers)
    }

    fn report(&self) -> Value {
        let loads = |i: usize| self.counts.iter().map(move |counts| counts[i].load(Ordering::Relaxed));
        json!({
            "watchers": self.counts.len(),
            "fewest_evaluations": loads(0).min(),
            "most_evaluations": loads(0).max(),
            "missed": loads(1).sum::<u64>(),
        })
    }
}

/// Counts the evaluations of an instance.
async fn watch(
    run: &Path,
    id: usize,
    counts: Arc<[AtomicU64; 2]>,
) -> anyhow::Result<tokio::task::JoinHandle<()>> {
    let request = wire::WatchRequest { hello: Some(quintlet_proto::hello()), ..Default::default() };
    let channel = socket::channel(Paths::new(run).probe(&id.to_string()));
    let mut events = ProbeClient::new(channel).watch(request).await?.into_inner();
    Ok(task::spawn("watcher", async move {
        while let Ok(Some(message)) = events.message().await {
            match message.event {
                Some(Event::Evaluation(_)) => counts[0].fetch_add(1, Ordering::Relaxed),
                Some(Event::Missed(missed)) => counts[1].fetch_add(missed.count, Ordering::Relaxed),
                _ => 0,
            };
        }
    }))
}

/// A process that computes. Dropping it ends it.
struct Busy(Child);

impl Busy {
    fn start() -> anyhow::Result<Self> {
        let mut shell = Command::new("sh");
        shell.args(["-c", "while :; do :; done"]).stdin(Stdio::null());
        Ok(Self(shell.spawn().context("failed to start sh")?))
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        // It runs until it is killed.
        let _killed = self.0.kill();
        let _exit = self.0.wait();
    }
}
