//! `kill -9` of each service, and of all five at once: the pods do not notice.
#![allow(
    clippy::disallowed_methods,
    clippy::large_futures,
    clippy::print_stdout,
    clippy::unwrap_used,
    missing_docs
)]

use std::time::Duration;

use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::wait::LONG;
use quintlet_e2e::{Node, Options, Seen, pods, until};

/// DESIGN §11: a service that was killed serves again within this.
const BACK: Duration = Duration::from_secs(2);

/// How far a restart may be from the time that was said before the fault.
const PUNCTUAL_NS: i64 = 1_000_000_000;

fn lines(node: &Node, pod: &Seen, kind: &str) -> usize {
    node.empty_dir_file(pod.uid(), "probes", kind).lines().count()
}

/// Waits until each pod was probed three times more.
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

/// Waits for the next instance of the crasher and asserts that it came when it was announced.
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

async fn young(node: &Node, name: &str) -> Seen {
    node.api().create_pod(pods::bound(pods::probed(name)));
    node.wait_ready(name).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_do_not_notice_killed_services() {
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

    // One after the other, each with a pod that has only just become Ready.
    let fresh = ["young-0", "young-1", "young-2", "young-3", "young-4", "young-5"];
    for (name, fresh) in SERVICES.into_iter().zip(fresh) {
        probed.push(young(&node, fresh).await);
        names.push(fresh);
        let before = node.steady(&names).await;
        let recorder = node.record().await;
        let startups: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).collect();
        let starts = node.kill9(name);
        node.wait_back(name, starts, BACK).await;
        three_periods(&node, &probed).await;
        recorder.assert_steady(&format!("after kill -9 of {name}"), &before);
        assert_eq!(node.steady(&names).await, before, "after kill -9 of {name}");
        let again: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).collect();
        assert_eq!(again, startups, "a startup probe that had passed ran again after kill -9 of {name}");
        node.assert_no_duplicates().await;
    }
    assert_punctual(&node, &crasher, announced).await;

    (crasher, announced) = wait_backoff(&node, "40s").await;
    probed.push(young(&node, fresh[5]).await);
    names.push(fresh[5]);
    let before = node.steady(&names).await;
    let recorder = node.record().await;
    let startups: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).collect();
    let starts = SERVICES.map(|name| (name, node.kill9(name)));
    for (name, starts) in starts {
        node.wait_back(name, starts, BACK).await;
    }
    three_periods(&node, &probed).await;
    recorder.assert_steady("after kill -9 of all five", &before);
    assert_eq!(node.steady(&names).await, before, "after kill -9 of all five");
    let again: Vec<usize> = probed.iter().map(|p| lines(&node, p, "startup")).collect();
    assert_eq!(again, startups, "a startup probe that had passed ran again after kill -9 of all five");
    assert_punctual(&node, &crasher, announced).await;
    node.assert_no_duplicates().await;

    node.down().await;
}
