//! Probes of one period begin together. A binary of its own, since timers are aligned for the whole process.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use parking_lot::Mutex;
use probe_service::handlers::{Attempt, Attempts};
use probe_service::metrics::Metrics;
use probe_service::prober::Prober;
use probe_service::target::{Handler, Pod, Probe, Target, View};
use quintlet_kit::clock::Clock;
use quintlet_kit::timers;
use quintlet_model::ids::{ContainerId, PodRef, PodUid};
use quintlet_model::probe::ProbeType;
use tokio::time::{Instant, sleep};

const PERIOD: Duration = Duration::from_secs(1);
const PROBES: usize = 20;
/// Time between the starts of two containers. It is no multiple of a slot.
const BETWEEN: Duration = Duration::from_millis(47);

/// Passes, and records when the attempts at each address began.
#[derive(Default)]
struct Recorder(Mutex<BTreeMap<String, Vec<Instant>>>);

impl Attempts for Recorder {
    fn attempt(&self, _: Arc<Probe>, _: String, pod_ip: String) -> BoxFuture<'static, Attempt> {
        self.0.lock().entry(pod_ip).or_default().push(Instant::now());
        Box::pin(async { Attempt::Success(String::new()) })
    }
}

fn pod(i: usize) -> Pod {
    let probe = Probe {
        kind: ProbeType::Readiness,
        handler: Handler::Tcp { host: None, port: 80 },
        initial_delay: Duration::ZERO,
        period: PERIOD,
        timeout: PERIOD,
        success_threshold: 1,
        failure_threshold: 3,
    };
    let view = View {
        container_id: Some(ContainerId::parse(&format!("c{i}")).unwrap()),
        running: true,
        started_at: Some(Duration::from_secs(999)),
        started: true,
        pod_ip: format!("10.0.0.{i}"),
    };
    let name = format!("p{i}");
    Pod {
        pod: PodRef {
            uid: PodUid::parse(&name).unwrap(),
            namespace: "default".into(),
            name: name.as_str().into(),
        },
        generation: 1,
        probes: vec![Target { container: "app".into(), probe: Arc::new(probe), view, seed: None }],
    }
}

#[tokio::test(start_paused = true)]
async fn probes_begin_at_once_and_then_in_slots_never_early() {
    timers::align();
    let recorder = Arc::new(Recorder::default());
    let attempts: Arc<dyn Attempts> = recorder.clone();
    let clock = Clock::fixed(jiff::Timestamp::UNIX_EPOCH, Duration::from_secs(1000));
    // No jitter: the first evaluation is due at once.
    let prober = Prober::new(attempts, clock, Metrics::new(), Box::new(|| 0.0));
    let driver = prober.attach();
    let mut added = Vec::new();
    for i in 0..PROBES {
        added.push(Instant::now());
        prober.set(&driver, pod(i), None).unwrap();
        sleep(BETWEEN).await;
    }
    sleep(5 * PERIOD).await;
    let begun = recorder.0.lock().clone();
    let slot = PERIOD / 25;
    let mut starts: Vec<Instant> = Vec::new();
    for (i, added) in added.iter().enumerate() {
        let of_probe = &begun[&format!("10.0.0.{i}")];
        assert!(of_probe[0] - *added <= Duration::from_millis(1), "the first evaluation of {i} is late");
        for pair in of_probe.windows(2) {
            let apart = pair[1] - pair[0];
            // The timer of tokio has a resolution of one millisecond.
            assert!((PERIOD..=PERIOD + slot + Duration::from_millis(1)).contains(&apart), "{i}: {apart:?}");
        }
        starts.extend(&of_probe[1..]);
    }
    starts.sort();
    let in_slots = starts.windows(2).all(|pair: &[Instant]| {
        let apart = (pair[1] - pair[0]).as_millis() % slot.as_millis();
        apart <= 1 || apart >= slot.as_millis() - 1
    });
    assert!(in_slots, "evaluations between slots");
}
