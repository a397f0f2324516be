//! Services of this version beside those of another one: the services are replaced one after the other, in
//! both directions.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use quintlet_e2e::bins::{self, SERVICES};
use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

/// Environment variable with the directory of the binaries of another version.
const OTHER_BIN_DIR: &str = "QUINTLET_OTHER_BIN_DIR";

/// Pods that start while a service is replaced.
const BURST: usize = 5;

/// An exec session in a pod, which repeats each line.
struct Session {
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Session {
    fn open(node: &Node, pod: &str) -> Self {
        let mut command = node.quintctl(&["exec", "-i", pod, "--", "cat"]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, input, output }
    }

    async fn repeats(&mut self, line: &str) {
        self.input.write_all(format!("{line}\n").as_bytes()).await.unwrap();
        let answer = tokio::time::timeout(LONG, self.output.next_line()).await;
        let answer = answer.unwrap_or_else(|_| panic!("the session does not answer {line}"));
        assert_eq!(answer.unwrap().as_deref(), Some(line), "the session has ended");
    }
}

/// Waits until each pod was probed twice more.
async fn two_periods(node: &Node, probed: &[Seen]) {
    let lines = |pod: &Seen| node.empty_dir_file(pod.uid(), "probes", "liveness").lines().count();
    let before: Vec<usize> = probed.iter().map(lines).collect();
    until("two more liveness probes of each pod", LONG, async || {
        let now: Vec<usize> = probed.iter().map(lines).collect();
        let enough = before.iter().zip(&now).all(|(before, now)| *now >= before + 2);
        if enough { Ok(()) } else { Err(format!("{before:?} became {now:?}")) }
    })
    .await;
}

/// Replaces a service by that of `dir`, while pods start and others are probed. Nothing restarts, and no pod
/// that is Ready loses it.
async fn replace(node: &mut Node, service: &'static str, dir: &Path, steady: &[&str], probed: &[Seen]) {
    let what = format!("{service} of {}", dir.display());
    let before = node.steady(steady).await;
    let recorder = node.record().await;
    let word = dir.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_lowercase();
    let burst: Vec<String> = (0..BURST).map(|n| format!("burst-{word}-{service}-{n}")).collect();
    let burst: Vec<&str> = burst.iter().map(String::as_str).collect();
    for name in &burst {
        node.api().create_pod(pods::bound(pods::http_probed(name)));
    }
    node.run_from(service, dir).await;
    for name in &burst {
        node.wait_ready(name).await;
    }
    two_periods(node, probed).await;
    recorder.assert_steady(&what, &before);
    recorder.assert_forward(&what, &burst);
    assert_eq!(node.steady(steady).await, before, "{what}");
    node.assert_no_duplicates().await;
    for name in &burst {
        node.api().delete("pods", "default", name, Some(0)).unwrap();
    }
    drop(recorder);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs the binaries of another version in QUINTLET_OTHER_BIN_DIR: make test-skew"]
async fn each_service_runs_with_those_of_the_other_version() {
    let other = std::env::var_os(OTHER_BIN_DIR).map(PathBuf::from);
    let other = other.unwrap_or_else(|| panic!("{OTHER_BIN_DIR} is not set: run make test-skew"));
    let own = bins::dir();
    let versions = [&own, &other].map(|dir| std::fs::read(dir.join("quintlet")).unwrap());
    assert!(versions[0] != versions[1], "{} and {} have the same binary", own.display(), other.display());
    let mut node = Node::start(Options::with_api("skew")).await;
    let steady = ["web-0", "web-1", "plain"];
    node.pod_manifest(&pods::probed("web-0"));
    for pod in [pods::probed("web-1"), pods::sleeper("plain")] {
        node.api().create_pod(pods::bound(pod));
    }
    let mut probed = Vec::new();
    for name in steady {
        probed.push(node.wait_ready(name).await);
    }
    probed.pop();
    let mut session = Session::open(&node, "web-1");
    session.repeats("begin").await;
    // Each service with older and with newer callers: the two rounds have each mix of versions that an
    // upgrade and a way back have.
    for dir in [&other, &own] {
        for service in SERVICES {
            replace(&mut node, service, dir, &steady, &probed).await;
            session.repeats(service).await;
        }
    }
    let Session { mut child, input, .. } = session;
    drop(input);
    assert!(tokio::time::timeout(LONG, child.wait()).await.unwrap().unwrap().success());
    node.down().await;
}
