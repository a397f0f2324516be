//! kubectl in a terminal, over SPDY and through node-api of a real node, and streams whose pod terminates.

use std::process::Stdio;

use quintlet_e2e::sockets::{of_node_api, of_runtime};
use quintlet_e2e::{LONG, Node, Options, Terminal, pods, until};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::Command;

fn options(name: &'static str) -> Options {
    Options { node_api: true, ..Options::with_api(name) }
}

/// Returns Debian's kubectl, which upgrades to SPDY, for the test API server.
fn kubectl(node: &Node, args: &[&str]) -> Command {
    let mut command = Command::new(quintlet_e2e::bins::kubectl());
    command
        .args(["--server", &node.api().url(), "--cache-dir"])
        .arg(node.scratch().join("kubectl-cache"))
        .args(args)
        .env_remove("KUBECONFIG")
        .kill_on_drop(true);
    command
}

fn terminal(node: &Node, args: &[&str]) -> Terminal {
    Terminal::open(kubectl(node, args).as_std(), 24, 80)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubectl_terminal_follows_the_size_of_the_users_terminal() {
    let node = Node::start(options("node-api-terminal")).await;
    node.api().create_pod(pods::bound(pods::sleeper("shell")));
    node.wait_ready("shell").await;
    let mut exec = terminal(&node, &["exec", "-it", "shell", "--", "sh"]);
    exec.shows("/ # ").await;
    exec.types_until("stty size\n", "24 80").await;
    exec.resize(50, 132);
    exec.types_until("stty size\n", "50 132").await;
    // Ctrl-C goes to the shell, not to kubectl.
    exec.types("echo star''ted; sleep 1000\n");
    exec.shows("started").await;
    exec.types("\x03exit 7\n");
    assert_eq!(exec.ends().await, Some(7));

    // Simulates `kubectl debug`, whose Debian version uses a removed API: adds a container and attaches to
    // it.
    node.api()
        .edit("pods/ephemeralcontainers", "default", "shell", |pod| {
            let image = pod["spec"]["containers"][0]["image"].clone();
            pod["spec"]["ephemeralContainers"] = json!([{"name": "debugger", "image": image, "stdin": true, "tty": true,
                "command": ["sh"], "imagePullPolicy": "IfNotPresent", "targetContainerName": "main"}]);
        })
        .unwrap();
    node.wait_pod("shell", "a debugger that runs", LONG, |pod| {
        !pod.text("/status/ephemeralContainerStatuses/0/state/running/startedAt").is_empty()
    })
    .await;
    let mut debug = terminal(&node, &["attach", "-it", "shell", "-c", "debugger"]);
    debug.types_until("stty size\n", "24 80").await;
    debug.resize(40, 100);
    debug.types_until("stty size\n", "40 100").await;
    // The shell sees the processes of the other container.
    debug.types("ps | grep 'slee[p] 100000' > /dev/null && echo fo''und\n");
    debug.shows("found\r\n").await;
    debug.types("exit\n");
    assert_eq!(debug.ends().await, Some(0));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_log_of_the_previous_instance_is_followed_to_its_end() {
    let node = Node::start(options("node-api-previous")).await;
    // The first instance takes the request and exits, a moment after its last line; the second one keeps
    // running.
    let script = "echo run; until [ -e /go/end ]; do sleep 0.1; done; rm /go/end; echo over; sleep 1; exit 3";
    let scratch = node.scratch();
    let mut pod = pods::bound(pods::with_dir(pods::script("again", script), &scratch, "/go"));
    pod["spec"]["restartPolicy"] = json!("Always");
    node.api().create_pod(pod);
    node.wait_ready("again").await;
    tokio::fs::write(scratch.join("end"), "").await.unwrap();
    node.wait_pod("again", "a second instance", LONG, |pod| {
        pod.container("main").restarts == 1 && pod.is_ready()
    })
    .await;
    until("the whole log", LONG, async || {
        let logs = kubectl(&node, &["logs", "-f", "--previous", "again"]).stdin(Stdio::null()).output();
        let logs = tokio::time::timeout(LONG, logs).await.expect("what has ended is not followed").unwrap();
        if logs.stdout == b"run\nover\n" && logs.status.success() { Ok(()) } else { Err(logs) }
    })
    .await;
    node.down().await;
}

/// Returns the value of a gauge of node-api.
async fn gauge(node: &Node, name: &str) -> Option<String> {
    let address = node.api().url().replace("http://", "");
    let (host, port) = address.rsplit_once(':').unwrap();
    let path = format!("/api/v1/nodes/{}/proxy/metrics", quintlet_e2e::NODE);
    let page = quintlet_e2e::page(host, port.parse().unwrap(), &path).await.ok()?;
    let name = format!("{name}{{service=\"node-api\"}} ");
    page.lines().find_map(|l| l.strip_prefix(&name)).map(str::to_owned)
}

async fn wait_gauge(node: &Node, name: &str, want: &str) {
    until(&format!("{name} {want}"), LONG, async || {
        let value = gauge(node, name).await;
        if value.as_deref() == Some(want) { Ok(()) } else { Err(value) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_end_with_their_pod_and_are_cleaned_up() {
    let node = Node::start(options("node-api-deleted")).await;
    // Prints a line on SIGTERM and waits a moment, so that the line is delivered.
    let script = "echo begun; trap 'echo stopping; sleep 1; exit 0' TERM; echo hello > /tmp/index.html; \
                  httpd -p 8080 -h /tmp; sleep 100000 & wait";
    let mut pod = pods::script("short", script);
    pod["spec"]["terminationGracePeriodSeconds"] = json!(20);
    pod["spec"]["containers"][0]["stdin"] = json!(true);
    node.api().create_pod(pods::bound(pod));
    let seen = node.wait_ready("short").await;
    let open = |args: &[&str]| {
        kubectl(&node, args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let mut exec = open(&["exec", "-i", "short", "--", "cat"]);
    let attach = open(&["attach", "-i", "short"]);
    let mut forward = open(&["port-forward", "pod/short", ":8080"]);
    let mut log = open(&["logs", "-f", "short"]);
    // Each stream works before the pod is deleted.
    exec.stdin.as_mut().unwrap().write_all(b"ping\n").await.unwrap();
    let mut echo = [0; 5];
    tokio::time::timeout(LONG, exec.stdout.as_mut().unwrap().read_exact(&mut echo))
        .await
        .expect("the echo")
        .unwrap();
    let mut lines = BufReader::new(log.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(LONG, lines.next_line()).await.expect("a line").unwrap();
    assert_eq!(line.as_deref(), Some("begun"));
    let mut forwarded = BufReader::new(forward.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(LONG, forwarded.next_line()).await.unwrap().unwrap().unwrap();
    let port: u16 = line.split([':', ' ']).nth(3).unwrap().parse().unwrap_or_else(|_| panic!("{line}"));
    until("the page through the port", LONG, async || {
        match quintlet_e2e::page("127.0.0.1", port, "/").await {
            Ok(page) if page == "hello\n" => Ok(()),
            other => Err(other),
        }
    })
    .await;
    wait_gauge(&node, "quintlet_node_api_upgrades", "3").await;
    wait_gauge(&node, "quintlet_node_api_log_streams", "1").await;

    node.api().delete("pods", "default", "short", None).unwrap();
    // The log arrives to its last line, followed by the end of the stream.
    let mut rest = Vec::new();
    while let Some(line) = tokio::time::timeout(LONG, lines.next_line()).await.expect("the log ends").unwrap()
    {
        rest.push(line);
    }
    assert_eq!(rest, ["stopping"]);
    assert!(tokio::time::timeout(LONG, log.wait()).await.expect("logs -f ends").unwrap().success());
    let attached = tokio::time::timeout(LONG, attach.wait_with_output()).await.expect("attach ends").unwrap();
    assert!(attached.status.success(), "{attached:?}");
    assert_eq!(String::from_utf8_lossy(&attached.stdout), "stopping\n");
    // The process is killed with the container, so the command fails, and the runtime reports the signal.
    drop(exec.stdin.take());
    let executed = tokio::time::timeout(LONG, exec.wait_with_output()).await.expect("exec ends").unwrap();
    assert!(!executed.status.success(), "{executed:?}");
    node.wait_gone(seen.uid()).await;
    // kubectl 1.20 keeps its port after its pod is deleted; the next connection through it fails.
    let _ = quintlet_e2e::page("127.0.0.1", port, "/").await;
    forward.kill().await.unwrap();
    wait_gauge(&node, "quintlet_node_api_upgrades", "0").await;
    wait_gauge(&node, "quintlet_node_api_log_streams", "0").await;
    until("no connection of node-api or the runtime", LONG, async || {
        let left = (of_node_api(&node), of_runtime(&node));
        if left.0.is_empty() && left.1.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    node.down().await;
}
