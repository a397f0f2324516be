//! Lag of HTTP probes, on an idle and on a busy machine, and the evaluations that watchers receive.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use parking_lot::Mutex;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::{socket, task};
use quintlet_proto::probe::v1::drive_report::Report;
use quintlet_proto::probe::v1::drive_request::Request;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::watch_event::Event;
use quintlet_proto::probe::v1::{self as wire, ProbeType};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Channel;

use crate::measure::{delays, usage};
use crate::{LIMIT, now, pid, service};

/// Processes that compute for all of their time.
const BUSY: usize = 2;

/// Arrivals of the requests of each probe, in CLOCK_BOOTTIME nanoseconds.
type Arrivals = Arc<Vec<Mutex<Vec<u64>>>>;

/// The probes that are measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProbeArgs {
    pub(crate) probes: usize,
    pub(crate) period: Duration,
    /// Watchers of the evaluations.
    pub(crate) watchers: usize,
    /// Time of each of the two measurements.
    pub(crate) span: Duration,
}

/// Measures probes on the machine as it is, and beside busy processes.
pub(crate) async fn measured(args: ProbeArgs) -> anyhow::Result<Value> {
    let ProbeArgs { probes, period, watchers, span } = args;
    let dir = tempfile::tempdir()?;
    let arrivals: Arrivals = Arc::new((0..probes).map(|_| Mutex::default()).collect());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let port = listener.local_addr()?.port();
    let server = task::spawn("server", accept(listener, Arc::clone(&arrivals)));
    let mut prober = service(dir.path(), "probe-service", &[]);
    let driver = Driver::start(dir.path(), port, args).await?;
    // Until each probe has its place within the period.
    wait_for_all(&arrivals).await?;
    let received = Watchers::open(dir.path(), watchers).await?;
    let quiet = observe(&arrivals, pid(&prober)?, args).await?;
    let busy: Vec<Busy> = (0..BUSY).map(|_| Busy::start()).collect::<anyhow::Result<_>>()?;
    let loaded = observe(&arrivals, pid(&prober)?, args).await?;
    drop(busy);
    ensure!(prober.process().starts == 1, "probe-service ended");
    let report = json!({
        "probes": probes,
        "period_ms": period.as_secs_f64() * 1000.0,
        "seconds": span.as_secs(),
        "idle_machine": quiet,
        "beside_busy_processes": loaded,
        "failures": driver.failures.load(Ordering::Relaxed),
        "watchers": received.report(),
    });
    server.abort();
    prober.terminate().await;
    Ok(report)
}

async fn wait_for_all(arrivals: &Arrivals) -> anyhow::Result<()> {
    let all = async {
        while arrivals.iter().any(|of_probe| of_probe.lock().len() < 2) {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(LIMIT, all).await.context("not all probes run")
}

/// Returns the lag of the probes' requests and the CPU of the service during `span`. The lag of a request is
/// the difference between its distance from the one before and the period.
async fn observe(arrivals: &Arrivals, pid: i32, args: ProbeArgs) -> anyhow::Result<Value> {
    let ProbeArgs { period, span, .. } = args;
    for of_probe in arrivals.iter() {
        of_probe.lock().clear();
    }
    let before = usage(pid)?;
    tokio::time::sleep(span).await;
    let after = usage(pid)?;
    let mut lags = Vec::new();
    for of_probe in arrivals.iter() {
        let times = of_probe.lock().clone();
        ensure!(times.len() > 1, "a probe has stopped");
        let period = u64::try_from(period.as_nanos()).unwrap_or(u64::MAX);
        lags.extend(times.windows(2).map(|pair| (pair[1] - pair[0]).abs_diff(period)));
    }
    Ok(json!({
        "lag_ms": delays(&lags),
        "cpu_percent": (after.cpu_seconds - before.cpu_seconds) * 100.0 / span.as_secs_f64(),
        "pss_kib": after.pss_kib,
    }))
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

/// Acts as pod-sync.
struct Driver {
    failures: Arc<AtomicU64>,
    reader: tokio::task::JoinHandle<()>,
    _requests: tokio::sync::mpsc::UnboundedSender<wire::DriveRequest>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

impl Driver {
    async fn start(run: &Path, port: u16, args: ProbeArgs) -> anyhow::Result<Self> {
        let mut client = client(run).await?;
        #[expect(clippy::disallowed_methods, reason = "a benchmark sends what it was told to")]
        let (requests, stream) = tokio::sync::mpsc::unbounded_channel();
        let send = |request| {
            let request = wire::DriveRequest { request: Some(request), trace: None };
            requests.send(request).ok().context("the stream has ended")
        };
        send(Request::Hello(quintlet_proto::hello()))?;
        for i in 0..args.probes {
            send(Request::Target(target(i, port, args.period)?))?;
        }
        send(Request::Complete(wire::FullSetComplete {}))?;
        let mut reports = client.drive(UnboundedReceiverStream::new(stream)).await?.into_inner();
        let failures = Arc::<AtomicU64>::default();
        let count = Arc::clone(&failures);
        let reader = task::spawn("driver", async move {
            while let Ok(Some(message)) = reports.message().await {
                if let Some(Report::Unhealthy(_)) = message.report {
                    count.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        Ok(Self { failures, reader, _requests: requests })
    }
}

async fn client(run: &Path) -> anyhow::Result<ProbeClient<Channel>> {
    let path = Paths::new(&run.join("run")).probe("0");
    socket::wait_ready(&path, LIMIT).await?;
    Ok(ProbeClient::new(socket::channel(path)))
}

fn target(i: usize, port: u16, period: Duration) -> anyhow::Result<wire::PodTarget> {
    let http = wire::HttpGet {
        scheme: "http".to_owned(),
        port: port.into(),
        path: format!("/{i}"),
        ..wire::HttpGet::default()
    };
    let probe = wire::ProbeSpec {
        r#type: ProbeType::Readiness as i32,
        handler: Some(wire::probe_spec::Handler::Http(http)),
        period_seconds: 1,
        period_ms: u32::try_from(period.as_millis())?,
        timeout_seconds: 1,
        success_threshold: 1,
        failure_threshold: 3,
        ..wire::ProbeSpec::default()
    };
    Ok(wire::PodTarget {
        uid: format!("uid-{i}"),
        name: format!("pod-{i}"),
        namespace: "default".to_owned(),
        generation: 1,
        pod_ip: "127.0.0.1".to_owned(),
        containers: vec![wire::ContainerTarget {
            name: "main".to_owned(),
            container_id: format!("container-{i}"),
            running: true,
            started_boottime_ns: 1,
            started: true,
            probes: vec![probe],
        }],
    })
}

/// Clients of Watch, each with its own connection.
struct Watchers {
    tasks: Vec<tokio::task::JoinHandle<()>>,
    /// Evaluations that each received, and those that the service dropped for it.
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
    async fn open(run: &Path, n: usize) -> anyhow::Result<Self> {
        let mut watchers = Self { tasks: Vec::new(), counts: Vec::new() };
        for _ in 0..n {
            let request = wire::WatchRequest { hello: Some(quintlet_proto::hello()), ..Default::default() };
            let mut events = client(run).await?.watch(request).await?.into_inner();
            let counts = Arc::<[AtomicU64; 2]>::default();
            watchers.counts.push(Arc::clone(&counts));
            watchers.tasks.push(task::spawn("watcher", async move {
                while let Ok(Some(message)) = events.message().await {
                    match message.event {
                        Some(Event::Evaluation(_)) => counts[0].fetch_add(1, Ordering::Relaxed),
                        Some(Event::Missed(missed)) => counts[1].fetch_add(missed.count, Ordering::Relaxed),
                        _ => 0,
                    };
                }
            }));
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
