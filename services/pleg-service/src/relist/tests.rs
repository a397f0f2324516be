use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use async_trait::async_trait;
use futures::FutureExt as _;
use parking_lot::Mutex;
use quintlet_kit::clock::Clock;
use quintlet_model::ids::{ContainerId, SandboxId};
use quintlet_model::runtime::{Container, ContainerState, Sandbox, SandboxState};
use quintlet_proto::pleg::v1::watch_event::Event;

use super::*;
use crate::core::{INSPECTIONS, Periods};
use crate::traits::{ContainerRuntime, HintKind};

const PODS: usize = 6_000;
const CONTAINERS: usize = 3;

fn pod(n: usize) -> PodRef {
    let uid = PodUid::parse(&format!("u{n}")).unwrap();
    PodRef { uid, namespace: "default".into(), name: format!("web-{n}").into() }
}

fn number(id: &str) -> usize {
    id.split('-').nth(1).unwrap().parse().unwrap()
}

/// A node with 18,000 containers, at once.
#[derive(Default)]
struct Full {
    exited: Mutex<HashSet<String>>,
    looking: AtomicUsize,
    /// The most containers looked at at once.
    most: AtomicUsize,
}

impl Full {
    fn state(&self, id: &str) -> ContainerState {
        if self.exited.lock().contains(id) { ContainerState::Exited } else { ContainerState::Running }
    }
}

#[async_trait]
impl ContainerRuntime for Full {
    async fn sandboxes(&self, filter: Filter) -> Result<Vec<ListedSandbox>, ReadError> {
        let sandbox =
            |n| ListedSandbox { id: format!("s-{n}"), pod: Some(pod(n)), state: SandboxState::Ready };
        Ok(match filter {
            Filter::All => (0..PODS).map(sandbox).collect(),
            Filter::Pod(_) | Filter::Id(_) => Vec::new(),
        })
    }

    async fn containers(&self, filter: Filter) -> Result<Vec<ListedContainer>, ReadError> {
        let container = |n: usize| {
            let (pod_number, id) = (n / CONTAINERS, format!("c-{}-{}", n / CONTAINERS, n % CONTAINERS));
            let state = self.state(&id);
            ListedContainer { id, sandbox_id: format!("s-{pod_number}"), pod: Some(pod(pod_number)), state }
        };
        Ok(match filter {
            Filter::All => (0..PODS * CONTAINERS).map(container).collect(),
            Filter::Pod(_) | Filter::Id(_) => Vec::new(),
        })
    }

    async fn sandbox(&self, id: &str) -> Result<Option<(PodRef, Sandbox)>, ReadError> {
        let sandbox = Sandbox {
            id: SandboxId::parse(id).unwrap(),
            attempt: 0,
            state: SandboxState::Ready,
            created_unix_ns: 1,
            ips: Vec::new(),
            has_network: true,
            host_network: false,
            runtime_handler: String::new(),
            labels: [("app".to_owned(), "web".to_owned())].into(),
            annotations: [("notes".to_owned(), "x".repeat(1_000))].into(),
        };
        let now = self.looking.fetch_add(1, Ordering::Relaxed) + 1;
        self.most.fetch_max(now, Ordering::Relaxed);
        tokio::task::yield_now().await;
        self.looking.fetch_sub(1, Ordering::Relaxed);
        Ok(Some((pod(number(id)), sandbox)))
    }

    async fn container(&self, id: &str, sandbox_id: &str) -> Result<Option<Container>, ReadError> {
        let state = self.state(id);
        Ok(Some(Container {
            id: ContainerId::parse(id).unwrap(),
            sandbox_id: SandboxId::parse(sandbox_id).unwrap(),
            name: "main".to_owned(),
            attempt: 0,
            state,
            created_unix_ns: 1,
            started_unix_ns: 1,
            finished_unix_ns: 0,
            exit_code: 0,
            reason: String::new(),
            message: String::new(),
            image: "busybox".to_owned(),
            image_ref: "busybox".to_owned(),
            image_id: String::new(),
            log_path: String::new(),
            labels: [(quintlet_model::labels::POD_UID.to_owned(), pod(number(id)).uid.to_string())].into(),
            annotations: [("notes".to_owned(), "x".repeat(1_000))].into(),
            mounts: Vec::new(),
            resources: None,
            user: None,
            stop_signal: String::new(),
        }))
    }
}

async fn full() -> (Arc<Full>, Arc<Core>) {
    let runtime = Arc::new(Full::default());
    let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1));
    let core = Core::new(Arc::clone(&runtime) as _, clock, Periods::default());
    list(&core, Instant::now()).await.unwrap();
    (runtime, core)
}

#[tokio::test(start_paused = true)]
async fn the_first_list_of_a_full_node_leaves_slots_for_observe_requests() {
    let (runtime, core) = full().await;
    assert_eq!(core.store.len(), PODS);
    assert_eq!(runtime.most.load(Ordering::Relaxed), FIRST_LOOKS, "one sandbox of each pod");
    const { assert!(FIRST_LOOKS < INSPECTIONS) };
}

#[tokio::test(start_paused = true)]
async fn a_relist_of_18_000_containers_yields_every_256_and_inspects_no_unchanged_pod() {
    let (_runtime, core) = full().await;
    let next = || {
        let ticket = core.begins();
        core.ends(ticket);
        ticket
    };
    let before = next();
    let mut relist = Box::pin(list(&core, Instant::now()));
    let mut turns = 0;
    let done = std::future::poll_fn(|cx| {
        turns += 1;
        match relist.poll_unpin(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => Poll::Pending,
        }
    });
    done.await.unwrap().unwrap();
    // Sandboxes and containers are put together by pod, pods are compared, and looked for among the known.
    let items = PODS + PODS * CONTAINERS + PODS + PODS;
    assert_eq!(turns, items / SLICE + 1);
    assert_eq!(next(), before + 1, "no inspection began");
}

#[tokio::test(start_paused = true)]
async fn a_watcher_receives_a_change_while_a_full_list_is_processed() {
    let (runtime, core) = full().await;
    let mut watch = Box::pin(core.readers.watch(Some(core.store.cursor())));
    assert!(matches!(watch.next().await.unwrap().unwrap().event, Some(Event::Hello(_))));
    let relist = {
        let core = Arc::clone(&core);
        quintlet_kit::task::spawn("relist", async move { list(&core, Instant::now()).await })
    };
    // It has begun, on this one thread.
    tokio::task::yield_now().await;
    runtime.exited.lock().insert("c-7-1".to_owned());
    let hinted = InspectionRequest {
        ids: vec!["c-7-1".to_owned()],
        expect: Some(("c-7-1".to_owned(), HintKind::Exited)),
        ..InspectionRequest::default()
    };
    core.request_inspection(&pod(7).uid, hinted);
    let Some(Event::Pod(seen)) = watch.next().await.unwrap().unwrap().event else { panic!("a change") };
    assert_eq!(seen.uid, "u7");
    assert!(!relist.is_finished(), "the frame came before the list was digested");
    relist.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_full_node_is_in_memory_once_and_its_idle_owners_are_small() {
    let (_runtime, core) = full().await;
    let record = core.store.get(&pod(3).uid).unwrap();
    // The store's, the owner's and this one.
    assert_eq!(Arc::strong_count(&record), 3);
    drop(record);
    core.inspect(&pod(3).uid, InspectionRequest::default()).await.unwrap().unwrap();
    assert_eq!(Arc::strong_count(&core.store.get(&pod(3).uid).unwrap()), 3, "seen again, too");
    let mailbox = Arc::<crate::mailbox::Mailbox>::default();
    let owner = crate::owner::run(Arc::clone(&core), pod(1).uid, mailbox);
    assert!(size_of_val(&owner) < 2_048, "{}", size_of_val(&owner));
}

#[tokio::test(start_paused = true)]
async fn no_message_of_a_watch_of_a_full_node_is_larger_than_its_pod() {
    use prost::Message as _;
    let (_runtime, core) = full().await;
    let mut watch = Box::pin(core.readers.watch(None));
    let (mut pods, mut largest) = (0, 0);
    loop {
        let message = watch.next().await.unwrap().unwrap();
        largest = largest.max(message.encoded_len());
        match message.event.unwrap() {
            Event::Pod(_) => pods += 1,
            Event::SnapshotEnd(_) => break,
            _ => {}
        }
    }
    assert_eq!(pods, PODS);
    assert!((4_000..8_000).contains(&largest), "{largest}");
}

/// Fails every list, or hangs in it.
struct Away {
    hangs: bool,
}

#[async_trait]
impl ContainerRuntime for Away {
    async fn sandboxes(&self, _: Filter) -> Result<Vec<ListedSandbox>, ReadError> {
        if self.hangs {
            std::future::pending::<()>().await;
        }
        Err(ReadError::Timeout { what: "ListPodSandbox", limit: Duration::ZERO })
    }

    async fn containers(&self, _: Filter) -> Result<Vec<ListedContainer>, ReadError> {
        Ok(Vec::new())
    }

    async fn sandbox(&self, _: &str) -> Result<Option<(PodRef, Sandbox)>, ReadError> {
        Ok(None)
    }

    async fn container(&self, _: &str, _: &str) -> Result<Option<Container>, ReadError> {
        Ok(None)
    }
}

#[tokio::test(start_paused = true)]
async fn failing_lists_keep_the_heartbeat_and_a_list_that_never_ends_stops_it() {
    for hangs in [false, true] {
        let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1000));
        let core = Core::new(Arc::new(Away { hangs }), clock.clone(), Periods::default());
        let running = quintlet_kit::task::spawn("relist", run(Arc::clone(&core)));
        tokio::time::sleep(Duration::from_secs(1)).await;
        for _ in 0..3 {
            clock.advance(Duration::from_secs(600));
            tokio::time::sleep(Duration::from_secs(60)).await;
            let age = core.heartbeat.age();
            assert_eq!(age > crate::stuck(core.periods), hangs, "{age:?}");
        }
        running.abort();
    }
}
