//! `kill -9` of each service, and of all five at once: running pods are not affected.

use std::time::Duration;

use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::wait::LONG;
use quintlet_e2e::{Node, Options, Seen, pods, until};

/// Time within which a killed service serves again.
const BACK: Duration = Duration::from_secs(2);

/// Age of a young pod at the kill.
const YOUNG: Duration = Duration::from_secs(2);

/// Time since the start of the crasher's back-off of 40 s when all five services are killed.
const INTO_BACKOFF_NS: i64 = 10_000_000_000;

/// Largest difference of a restart from the time that was reported before the fault.
const PUNCTUAL_NS: i64 = 1_000_000_000;

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

async fn wait_backoff(node: &Node, delay: &str) -> (Seen, i64) {
    let want = format!("back-off {delay}");
    let crasher = node
        .wait_pod("crasher", &want, LONG, |p| {
            p.view.waiting.as_ref().is_some_and(|w| w.message.contains(&want) && w.until_unix_ns > 0)
        })
        .await;
    let until = crasher.view.waiting.as_ref().unwrap().until_unix_ns;
    (crasher, until)
}

/// Waits for the next instance of the crasher, and asserts that it started at the reported time.
async fn assert_punctual(node: &Node, crasher: &Seen, announced: i64) {
    let attempt = u32::try_from(crasher.container("main").restarts).unwrap() + 1;
    let created = until("the crasher's next instance", LONG, async || {
        let attempts = node.listed().await.attempts(crasher.uid(), "main");
        attempts.get(&attempt).copied().ok_or(attempts)
    })
    .await;
    let late = created - announced;
    assert!(late.abs() <= PUNCTUAL_NS, "instance {attempt} of the crasher came {} ms late", late / 1_000_000);
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

/// Waits for a wall time in nanoseconds since 1970.
async fn wait_wall(unix_ns: i64) {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let left = unix_ns - i64::try_from(now.as_nanos()).unwrap();
    tokio::time::sleep(Duration::from_nanos(u64::try_from(left).unwrap_or_default())).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_services_do_not_affect_running_pods() {
    let node = Node::start(Options::with_api("kill")).await;
    let mut names = vec!["web-0", "web-1", "plain"];
    for pod in [pods::probed("web-0"), pods::script("crasher", "exit 3")] {
        node.pod_manifest(&pod);
    }
    for pod in [pods::probed("web-1"), pods::sleeper("plain")] {
        node.api().create_pod(pods::bound(pod));
    }
    let mut probed = Vec::new();
    for name in &names {
        probed.push(node.wait_ready(name).await);
    }
    probed.pop();
    let (mut crasher, mut announced) = wait_backoff(&node, "20s").await;

    // Each kill affects a pod that is 2 s old.
    let fresh = ["young-0", "young-1", "young-2", "young-3", "young-4", "young-5"];
    for (name, fresh) in SERVICES.into_iter().zip(fresh) {
        let what = format!("after kill -9 of {name}");
        let before = node.steady(&names).await;
        let recorder = node.record().await;
        let startups: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).collect();
        young(&node, fresh).await;
        let passed = passed_startup(&node, fresh).await;
        let starts = node.kill9(name);
        node.wait_back(name, starts, BACK).await;
        let grown = node.wait_ready(fresh).await;
        probed.push(grown.clone());
        three_periods(&node, &probed).await;
        recorder.assert_steady(&what, &before);
        recorder.assert_forward(&what, &[fresh]);
        assert_eq!(node.steady(&names).await, before, "{what}");
        let again: Vec<usize> =
            probed.iter().map(|p| lines(&node, p, "startup")).take(startups.len()).collect();
        assert_eq!(again, startups, "a startup probe that had passed ran again {what}");
        if let Some(passed) = passed {
            assert_eq!(lines(&node, &grown, "startup"), passed, "a young startup probe ran again {what}");
        }
        node.assert_no_duplicates().await;
        names.push(fresh);
    }
    assert_punctual(&node, &crasher, announced).await;

    // All five are killed 10 s into the crasher's back-off of 40 s.
    (crasher, announced) = wait_backoff(&node, "40s").await;
    let at = announced - 40_000_000_000 + INTO_BACKOFF_NS;
    let young_ns = i64::try_from(YOUNG.as_nanos()).unwrap();
    wait_wall(at - young_ns).await;
    let what = "after kill -9 of all five";
    let before = node.steady(&names).await;
    let recorder = node.record().await;
    let startups: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).collect();
    young(&node, fresh[5]).await;
    let passed = passed_startup(&node, fresh[5]).await;
    wait_wall(at).await;
    let starts = SERVICES.map(|name| (name, node.kill9(name)));
    for (name, starts) in starts {
        node.wait_back(name, starts, BACK).await;
    }
    let grown = node.wait_ready(fresh[5]).await;
    let old = probed.len();
    probed.push(grown.clone());
    three_periods(&node, &probed).await;
    recorder.assert_steady(what, &before);
    recorder.assert_forward(what, &[fresh[5]]);
    assert_eq!(node.steady(&names).await, before, "{what}");
    let again: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).take(old).collect();
    assert_eq!(again, startups, "a startup probe that had passed ran again {what}");
    if let Some(passed) = passed {
        assert_eq!(lines(&node, &grown, "startup"), passed, "a young startup probe ran again {what}");
    }
    assert_punctual(&node, &crasher, announced).await;
    node.assert_no_duplicates().await;

    node.down().await;
}
