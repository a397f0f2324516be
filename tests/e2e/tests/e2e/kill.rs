//! `kill -9` of each service, and of all five at once: running pods are not affected.

use std::time::Duration;

use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};

/// Time within which a killed service serves again.
const BACK: Duration = Duration::from_secs(2);

/// Age of a young pod at the kill.
const YOUNG: Duration = Duration::from_secs(2);

/// Time before the end of the crasher's back-off at which all five services are killed: 10 s into a back-off
/// of 40 s.
const BEFORE_RESTART: Duration = Duration::from_secs(30);

/// Most that a restart may come before the time that was reported before the fault.
const EARLY_NS: i64 = 1_000_000_000;

/// Most that it may come after that time. The kills take both processors, beside the nodes of other tests. A
/// restart that was forgotten comes with the next sync of the pod, which is up to a minute later.
const LATE_NS: i64 = 3_000_000_000;

fn lines(node: &Node, pod: &Seen, kind: &str) -> usize {
    node.empty_dir_file(pod.uid(), "probes", kind).lines().count()
}

/// Waits until each pod was probed three more times.
async fn three_periods(node: &Node, probed: &[Seen]) {
    let before: Vec<usize> = probed.iter().map(|p| lines(node, p, "liveness")).collect();
    until("three more liveness probes of each pod", LONG, async || {
        let now: Vec<usize> = probed.iter().map(|p| lines(node, p, "liveness")).collect();
        let enough = before.iter().zip(&now).all(|(before, now)| *now >= before + 3);
        if enough { Ok(()) } else { Err(format!("{before:?} became {now:?}")) }
    })
    .await;
}

/// Waits for a back-off of the crasher that lasts for `left` at least; returns the time of the restart in
/// nanoseconds since 1970.
async fn wait_backoff(node: &Node, left: Duration) -> (Seen, i64) {
    let end = |p: &Seen| p.view.waiting.as_ref().map_or(0, |w| w.until_unix_ns);
    let what = format!("a back-off that lasts for {left:?}");
    let crasher = node.wait_pod("crasher", &what, LONG, |p| end(p) >= now_ns() + nanos(left)).await;
    let announced = end(&crasher);
    (crasher, announced)
}

/// Waits for the next instance of the crasher, and asserts that it started at the reported time.
///
/// Runs beside the kills: the runtime keeps one ended instance only.
async fn assert_punctual(node: &Node, crasher: &Seen, announced: i64) {
    wait_wall(announced).await;
    let attempt = u32::try_from(crasher.container("main").restarts).unwrap() + 1;
    let created = until("the crasher's next instance", LONG, async || {
        let attempts = node.listed().await.attempts(crasher.uid(), "main");
        attempts.get(&attempt).copied().ok_or(attempts)
    })
    .await;
    let late = created - announced;
    assert!(
        (-EARLY_NS..=LATE_NS).contains(&late),
        "instance {attempt} of the crasher came {} ms late",
        late / 1_000_000
    );
}

/// Creates a pod, and returns when it is [`YOUNG`] old, in whatever state it is.
async fn young(node: &Node, name: &str) {
    let until = tokio::time::Instant::now() + YOUNG;
    node.api().create_pod(pods::bound(pods::probed(name)));
    tokio::time::sleep_until(until).await;
}

/// Returns the number of runs of a pod's startup probe, if it has passed.
async fn passed_startup(node: &Node, name: &str) -> Option<usize> {
    let seen = node.pod(name).await.ok()?;
    let main = seen.containers().remove("main")?;
    main.started.then(|| lines(node, &seen, "startup"))
}

fn nanos(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap()
}

fn now_ns() -> i64 {
    nanos(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap())
}

/// Waits for a wall time in nanoseconds since 1970.
async fn wait_wall(unix_ns: i64) {
    let left = unix_ns - now_ns();
    tokio::time::sleep(Duration::from_nanos(u64::try_from(left).unwrap_or_default())).await;
}

/// Pods that a kill must not affect.
struct Watched {
    names: Vec<&'static str>,
    probed: Vec<Seen>,
}

impl Watched {
    fn startups(&self, node: &Node) -> Vec<usize> {
        self.probed.iter().map(|p| lines(node, p, "startup")).collect()
    }

    /// Kills services at `at`, when the new pod `fresh` is [`YOUNG`] old, and asserts that no pod is
    /// affected.
    async fn assert_unaffected(&mut self, node: &Node, services: &[&str], fresh: &'static str, at: i64) {
        let what = format!("after kill -9 of {services:?}");
        let before = node.steady(&self.names).await;
        let recorder = node.record().await;
        let startups = self.startups(node);
        wait_wall(at - nanos(YOUNG)).await;
        young(node, fresh).await;
        let passed = passed_startup(node, fresh).await;
        let starts: Vec<(&str, u32)> = services.iter().map(|name| (*name, node.kill9(name))).collect();
        for (name, starts) in starts {
            node.wait_back(name, starts, BACK).await;
        }
        let grown = node.wait_ready(fresh).await;
        self.probed.push(grown.clone());
        three_periods(node, &self.probed).await;
        recorder.assert_steady(&what, &before);
        recorder.assert_forward(&what, &[fresh]);
        assert_eq!(node.steady(&self.names).await, before, "{what}");
        let again = self.startups(node);
        assert_eq!(again[..startups.len()], startups, "a startup probe that had passed ran again {what}");
        if let Some(passed) = passed {
            assert_eq!(lines(node, &grown, "startup"), passed, "a young startup probe ran again {what}");
        }
        node.assert_no_duplicates().await;
        self.names.push(fresh);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_services_do_not_affect_running_pods() {
    let node = Node::start(Options::with_api("kill")).await;
    let mut watched = Watched { names: vec!["web-0", "web-1", "plain"], probed: Vec::new() };
    for pod in [pods::probed("web-0"), pods::script("crasher", "exit 3")] {
        node.pod_manifest(&pod);
    }
    for pod in [pods::probed("web-1"), pods::sleeper("plain")] {
        node.api().create_pod(pods::bound(pod));
    }
    for name in &watched.names {
        let seen = node.wait_ready(name).await;
        watched.probed.push(seen);
    }
    watched.probed.pop();

    // Each kill affects a pod that is 2 s old. The crasher is in its back-off of 20 s.
    let (crasher, announced) = wait_backoff(&node, Duration::from_secs(15)).await;
    let kills = async {
        for (name, fresh) in SERVICES.into_iter().zip(["young-0", "young-1", "young-2", "young-3", "young-4"])
        {
            watched.assert_unaffected(&node, &[name], fresh, now_ns() + nanos(YOUNG)).await;
        }
    };
    tokio::join!(kills, assert_punctual(&node, &crasher, announced));

    // All five are killed while the crasher waits.
    let (crasher, announced) = wait_backoff(&node, BEFORE_RESTART + YOUNG).await;
    let at = announced - nanos(BEFORE_RESTART);
    let kills = watched.assert_unaffected(&node, &SERVICES, "young-5", at);
    tokio::join!(kills, assert_punctual(&node, &crasher, announced));

    node.down().await;
}
