//! Fifty subscribers of one service, one of which reads nothing.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::clock::Clock;
use quintlet_kit::journal::{Journal, JournalEvent};
use quintlet_kit::messages::Bounded;
use quintlet_kit::socket::channel;
use quintlet_kit::subscribe::serve;
use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::containers_server::{Containers, ContainersServer};
use quintlet_proto::subscribe::v1::watch_containers_event::Event;
use quintlet_proto::subscribe::v1::{Beat, PodContainers, WatchContainersEvent, WatchContainersRequest};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tonic::{Request, Response, Status};

const READERS: usize = 49;
const CHANGES: u32 = 300;

/// Sends the pods of a journal, without a limit for one user: all readers of this test are one.
struct Feed(Arc<Journal<u32, PodContainers>>);

#[tonic::async_trait]
impl Containers for Feed {
    type WatchStream = Bounded<WatchContainersEvent>;

    async fn watch(&self, _: Request<WatchContainersRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let events = self.0.read(None).map(|item| {
            let event = match item.event {
                JournalEvent::Value(pod) => Event::Pod((*pod).clone()),
                _ => Event::Beat(Beat {}),
            };
            Ok(WatchContainersEvent { event: Some(event), cursor: None })
        });
        Ok(Response::new(Bounded::new("Containers.Watch", events)))
    }
}

/// Returns a change of about 4 KiB, so that a client that reads nothing soon has no room.
fn change(number: u32) -> PodContainers {
    let name = format!("{number:04096}");
    PodContainers { uid: number.to_string(), name, ..PodContainers::default() }
}

/// Makes changes, each once all readers have the one before it. Returns the median and the 99th percentile of
/// the delays.
async fn delays(
    journal: &Journal<u32, PodContainers>,
    numbers: std::ops::Range<u32>,
    received: &mut mpsc::UnboundedReceiver<u32>,
) -> [Duration; 2] {
    let mut delays = Vec::new();
    for number in numbers {
        let sent = std::time::Instant::now();
        journal.put(number % 50, change(number));
        for reader in 0..READERS {
            let next = tokio::time::timeout(Duration::from_secs(60), received.recv()).await;
            assert_eq!(next, Ok(Some(number)), "{reader} readers have change {number}");
            delays.push(sent.elapsed());
        }
    }
    delays.sort_unstable();
    [delays[delays.len() / 2], delays[delays.len() * 99 / 100]]
}

// The time is paused: it advances only while nothing but a timer is due, so any wait for the client that does
// not read shows. The delays are real, for the printed figures; what they are depends on the machine.
#[tokio::test(start_paused = true)]
async fn one_of_fifty_subscribers_that_reads_nothing_makes_no_other_one_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (path, stop) = (dir.path().join("subscribe/kit/subscribe.sock"), CancellationToken::new());
    let journal = Arc::new(Journal::new(&Clock::system()));
    journal.set_primed();
    let args =
        SubscriberArgs { subscriber_uid: vec![nix::unistd::geteuid().as_raw()], ..SubscriberArgs::default() };
    serve(&path, &args, &stop, |server| server.add_service(ContainersServer::new(Feed(journal.clone()))));
    let (sender, mut received) = mpsc::unbounded_channel();
    let mut shared = channel(path.clone());
    for reader in 0..READERS {
        // A connection has two calls.
        if reader % 2 == 0 {
            shared = channel(path.clone());
        }
        let watched = ContainersClient::new(shared.clone()).watch(WatchContainersRequest::default()).await;
        let (mut events, sender) = (watched.unwrap().into_inner(), sender.clone());
        tokio::spawn(async move {
            while let Ok(Some(event)) = events.message().await {
                if let Some(Event::Pod(pod)) = event.event {
                    let _ = sender.send(pod.uid.parse().unwrap());
                }
            }
        });
    }
    let without = delays(&journal, 0..CHANGES, &mut received).await;
    let address = format!("unix://{}", path.display());
    let endpoint = Endpoint::from_shared(address).unwrap().initial_stream_window_size(1024);
    let mut client = ContainersClient::new(endpoint.connect_lazy());
    let stalled = client.watch(WatchContainersRequest::default()).await.unwrap().into_inner();
    let began = tokio::time::Instant::now();
    let with = delays(&journal, CHANGES..2 * CHANGES, &mut received).await;
    assert_eq!(began.elapsed(), Duration::ZERO, "a reader waited");
    println!("p50, p99 of 49 readers: {without:?}; beside one that reads nothing: {with:?}");
    drop(stalled);
    stop.cancel();
}
