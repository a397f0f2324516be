//! The built binary when it is suspended, resumed, killed and restarted.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;
use quintlet_kit::socket;
use quintlet_proto::probe::v1::drive_report::Report;
use quintlet_proto::probe::v1::drive_request::Request as DriverRequest;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::{self as wire, Outcome, ProbeType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;

const SOON: Duration = Duration::from_secs(10);

/// Kills its process when dropped.
struct Service(Child);

impl Service {
    fn start(run: &Path) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_probe-service"))
            .arg("--run-dir")
            .arg(run)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id().cast_signed()), signal).unwrap();
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Replies to every request with 200 after `delay`, and records the CLOCK_BOOTTIME of each.
async fn serve(delay: Duration) -> (u16, Arc<Mutex<Vec<Duration>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let arrivals = Arc::new(Mutex::new(Vec::new()));
    let recorded = Arc::clone(&arrivals);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            recorded.lock().unwrap().push(Clock::system().boot());
            tokio::spawn(async move {
                let mut request = [0; 1024];
                let _ = stream.read(&mut request).await;
                sleep(delay).await;
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
            });
        }
    });
    (port, arrivals)
}

struct Driver {
    reports: Streaming<wire::DriveReport>,
    _requests: mpsc::UnboundedSender<wire::DriveRequest>,
}

impl Driver {
    async fn drive(run: &Path, target: wire::PodTarget) -> Self {
        let path = Paths::new(run).probe("0");
        socket::wait_ready(&path, SOON).await.unwrap();
        let (requests, stream) = mpsc::unbounded_channel();
        requests
            .send(wire::DriveRequest { request: Some(DriverRequest::Target(target)), trace: None })
            .unwrap();
        let mut client = ProbeClient::new(socket::channel(path));
        let reports = client.drive(UnboundedReceiverStream::new(stream)).await.unwrap().into_inner();
        Self { reports, _requests: requests }
    }

    async fn next(&mut self) -> Report {
        self.reports.message().await.unwrap().unwrap().report.unwrap()
    }

    async fn ready(&mut self) -> wire::Memory {
        loop {
            if let Report::Result(wire::Result { memory: Some(memory), .. }) = self.next().await
                && memory.result() == Outcome::Success
            {
                return memory;
            }
        }
    }
}

fn target(port: u16, memory: Option<wire::Memory>) -> wire::PodTarget {
    let http =
        wire::HttpGet { scheme: "http".into(), port: port.into(), path: "/".into(), ..Default::default() };
    let probe = wire::ProbeSpec {
        r#type: ProbeType::Readiness as i32,
        handler: Some(wire::probe_spec::Handler::Http(http)),
        period_seconds: 1,
        timeout_seconds: 1,
        failure_threshold: 1,
        memory,
        ..Default::default()
    };
    wire::PodTarget {
        uid: "u1".into(),
        name: "web".into(),
        namespace: "default".into(),
        generation: 1,
        pod_ip: "127.0.0.1".into(),
        containers: vec![wire::ContainerTarget {
            name: "app".into(),
            container_id: "c1".into(),
            running: true,
            started_boottime_ns: 1,
            started: true,
            probes: vec![probe],
        }],
    }
}

#[tokio::test]
async fn a_stop_during_a_probe_does_not_fail_the_container() {
    let dir = tempfile::tempdir().unwrap();
    // Slow enough that a stop at any time most likely interrupts an attempt.
    let (port, arrivals) = serve(Duration::from_millis(700)).await;
    let service = Service::start(dir.path());
    let mut driver = Driver::drive(dir.path(), target(port, None)).await;
    timeout(SOON, driver.ready()).await.unwrap();
    for _ in 0..2 {
        let before = arrivals.lock().unwrap().len();
        while arrivals.lock().unwrap().len() == before {
            sleep(Duration::from_millis(5)).await;
        }
        service.signal(Signal::SIGSTOP);
        sleep(Duration::from_secs(2)).await;
        service.signal(Signal::SIGCONT);
        let failure = timeout(Duration::from_millis(1500), async {
            loop {
                match driver.next().await {
                    Report::Result(r)
                        if r.memory.as_ref().is_some_and(|m| m.result() == Outcome::Failure) =>
                    {
                        break;
                    }
                    Report::Unhealthy(_) => break,
                    _ => {}
                }
            }
        });
        assert!(failure.await.is_err(), "nothing fails");
    }
}

#[tokio::test]
async fn after_a_kill_probes_continue_with_the_restored_memory() {
    let dir = tempfile::tempdir().unwrap();
    let (port, arrivals) = serve(Duration::ZERO).await;
    let service = Service::start(dir.path());
    let mut driver = Driver::drive(dir.path(), target(port, None)).await;
    let memory = timeout(SOON, driver.ready()).await.unwrap();
    sleep(Duration::from_millis(1500)).await;
    drop((driver, service));
    let service = Service::start(dir.path());
    let mut driver = Driver::drive(dir.path(), target(port, Some(memory.clone()))).await;
    let kept = timeout(SOON, driver.ready()).await.unwrap();
    assert_eq!((kept.container_id, kept.run), (memory.container_id, memory.run));
    assert!(kept.counter >= memory.counter);
    sleep(Duration::from_millis(1500)).await;
    drop((driver, service));
    let arrivals = arrivals.lock().unwrap();
    let gap = arrivals.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap();
    assert!(gap <= Duration::from_secs(2), "longest gap {gap:?}");
}
