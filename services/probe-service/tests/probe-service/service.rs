//! The service over its socket, with a driver and observers.

use std::path::Path;
use std::time::Duration;

use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::args::paths::Paths;
use quintlet_kit::socket;
use quintlet_proto::probe::v1::drive_report::Report;
use quintlet_proto::probe::v1::drive_request::Request as DriverRequest;
use quintlet_proto::probe::v1::probe_client::ProbeClient;
use quintlet_proto::probe::v1::watch_event::Event;
use quintlet_proto::probe::v1::{self as wire, Outcome, ProbeType};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;
use tonic::transport::Channel;

const SOON: Duration = Duration::from_secs(10);

async fn client(run: &Path) -> ProbeClient<Channel> {
    let path = Paths::new(run).probe("0");
    socket::wait_ready(&path, SOON).await.unwrap();
    ProbeClient::new(socket::channel(path))
}

struct Driver {
    requests: mpsc::UnboundedSender<wire::DriveRequest>,
    reports: Streaming<wire::DriveReport>,
}

impl Driver {
    async fn new(client: &mut ProbeClient<Channel>) -> Self {
        let (requests, stream) = mpsc::unbounded_channel();
        let reports = client.drive(UnboundedReceiverStream::new(stream)).await.unwrap().into_inner();
        let mut driver = Self { requests, reports };
        driver.request(DriverRequest::Hello(quintlet_proto::hello()));
        assert!(matches!(driver.next().await, Report::Hello(_)));
        driver
    }

    fn request(&self, request: DriverRequest) {
        self.requests.send(wire::DriveRequest { request: Some(request), trace: None }).unwrap();
    }

    async fn next(&mut self) -> Report {
        let next = timeout(SOON, self.reports.message()).await.expect("a report in time");
        next.unwrap().expect("a report before the end").report.expect("a report that says something")
    }

    /// Reads reports up to the first for which `fits` returns a value.
    async fn until<T>(&mut self, fits: impl Fn(&Report) -> Option<T>) -> T {
        loop {
            if let Some(found) = fits(&self.next().await) {
                return found;
            }
        }
    }
}

fn target(port: u16) -> wire::PodTarget {
    let probe = wire::ProbeSpec {
        r#type: ProbeType::Readiness as i32,
        handler: Some(wire::probe_spec::Handler::Tcp(wire::TcpSocket {
            host: String::new(),
            port: port.into(),
            ..Default::default()
        })),
        period_seconds: 1,
        timeout_seconds: 1,
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

fn ready(report: &Report) -> Option<wire::Memory> {
    match report {
        Report::Result(r) => r.memory.clone().filter(|m| m.result() == Outcome::Success),
        _ => None,
    }
}

#[tokio::test]
async fn a_driver_of_an_incompatible_schema_is_refused_before_its_first_target() {
    let dir = tempfile::tempdir().unwrap();
    let stop = CancellationToken::new();
    let service = tokio::spawn({
        let (run, stop) = (dir.path().to_owned(), stop.clone());
        async move { probe_service::run(&run, "0", &[], &SubscriberArgs::default(), stop).await }
    });
    let mut client = client(dir.path()).await;
    let (requests, stream) = mpsc::unbounded_channel();
    let own = quintlet_proto::hello();
    let hello = quintlet_proto::common::v1::Hello { schema: own.schema + 2, ..own };
    for request in [DriverRequest::Hello(hello), DriverRequest::Target(target(1))] {
        requests.send(wire::DriveRequest { request: Some(request), trace: None }).unwrap();
    }
    let mut reports = client.drive(UnboundedReceiverStream::new(stream)).await.unwrap().into_inner();
    let refusal = loop {
        match timeout(SOON, reports.message()).await.unwrap() {
            Ok(report) => assert!(report.is_some(), "the stream ends with an error"),
            Err(refusal) => break refusal,
        }
    };
    assert_eq!(refusal.code(), tonic::Code::FailedPrecondition);
    assert!(refusal.message().starts_with("pod-sync "), "{refusal}");
    // The next driver gets the memory of all targets, and there is none.
    let mut next = Driver::new(&mut client).await;
    assert!(matches!(next.next().await, Report::ReplayEnd(_)));
    stop.cancel();
    service.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_pod_is_probed_observed_moved_and_released() {
    let dir = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let stop = CancellationToken::new();
    let run = dir.path().to_owned();
    let service = tokio::spawn({
        let (run, stop) = (run.clone(), stop.clone());
        async move { probe_service::run(&run, "0", &[], &SubscriberArgs::default(), stop).await }
    });
    let mut client = client(&run).await;
    let watch = wire::WatchRequest { hello: Some(quintlet_proto::hello()), uid: "u1".into(), resume: None };
    let mut events = client.watch(watch).await.unwrap().into_inner();
    assert!(matches!(events.message().await.unwrap().unwrap().event, Some(Event::Hello(_))));

    let mut first = Driver::new(&mut client).await;
    first.request(DriverRequest::Target(wire::PodTarget { uid: "../bad".into(), ..target(port) }));
    // A container from long before the service waits for a random part of its period.
    first.request(DriverRequest::Target(target(port)));
    let memory = first.until(ready).await;
    assert_eq!((memory.counter, memory.run, memory.container_id.as_str()), (1, 1, "c1"));
    let event = timeout(SOON, events.message()).await.unwrap().unwrap().unwrap();
    assert!(
        matches!(event.event, Some(Event::Evaluation(e)) if e.pod_name == "web" && e.outcome() == Outcome::Success)
    );

    // The second driver receives everything, and the first one the reason for its end.
    let mut second = Driver::new(&mut client).await;
    let ended = timeout(SOON, async {
        loop {
            match first.reports.message().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        }
    });
    assert_eq!(ended.await.unwrap().unwrap_err().code(), tonic::Code::Aborted);
    let replayed = second.until(ready).await;
    assert!(replayed.counter >= 1);
    second.until(|r| matches!(r, Report::ReplayEnd(_)).then_some(())).await;

    drop(listener);
    let message = second
        .until(|r| match r {
            Report::Unhealthy(u) => Some(u.message.clone()),
            _ => None,
        })
        .await;
    let refused = format!("Readiness probe failed: dial tcp 127.0.0.1:{port}: connect: connection refused");
    assert_eq!(message, refused);
    second.request(DriverRequest::Release(wire::ReleasePod { uid: "u1".into(), generation: 1 }));
    let released = second
        .until(|r| match r {
            Report::Released(r) => Some(r.clone()),
            _ => None,
        })
        .await;
    assert_eq!(released.memory.len(), 1);
    assert_eq!(released.memory[0].memory.as_ref().unwrap().last(), Outcome::Failure);

    // Open streams do not delay the shutdown.
    stop.cancel();
    timeout(Duration::from_secs(1), service).await.expect("it ends at once").unwrap().unwrap();
    assert!(!Paths::new(&run).probe("0").exists());
}
