//! node-api on a real runtime: kubectl and WebSocket clients through the API server, as an unprivileged user.

use std::process::{Output, Stdio};

use futures::{SinkExt as _, StreamExt as _};
use quintlet_cri_api::v1::ReopenContainerLogRequest;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_e2e::follow::Follower;
use quintlet_e2e::{LONG, NODE, Node, Options, pods, until};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest as _;

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

async fn run(node: &Node, args: &[&str]) -> Output {
    let output = kubectl(node, args).stdin(Stdio::null()).output();
    tokio::time::timeout(LONG, output).await.unwrap_or_else(|_| panic!("kubectl {args:?} hangs")).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_reads_logs_and_runs_commands() {
    let node = Node::start(options("node-api-kubectl")).await;
    let api = node.api();
    let published = |n: &serde_json::Value| {
        n["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"] == json!(node.node_api().port())
    };
    api.wait_for("nodes", "", NODE, LONG, published).await;
    api.create_pod(pods::bound(pods::script(
        "talker",
        "echo one; echo two; printf three; trap 'exit 0' TERM; sleep 100000 & wait",
    )));
    // A separate pod: the runtime reads both streams, in no order.
    api.create_pod(pods::bound(pods::script(
        "moaner",
        "echo no >&2; trap 'exit 0' TERM; sleep 100000 & wait",
    )));
    node.wait_ready("talker").await;
    node.wait_ready("moaner").await;

    for (pod, want) in [("talker", "one\ntwo\n"), ("moaner", "no\n")] {
        until(&format!("the log of {pod}"), LONG, async || {
            let output = run(&node, &["logs", pod]).await;
            if output.status.success() && text(&output.stdout) == want { Ok(()) } else { Err(output) }
        })
        .await;
    }
    let tail = run(&node, &["logs", "--tail=1", "--timestamps", "talker"]).await;
    let (time, line) = text(&tail.stdout).split_once(' ').map(|(t, l)| (t.to_owned(), l.to_owned())).unwrap();
    assert_eq!((time.len(), line.as_str()), (30, "two\n"), "{time}");
    let missing = run(&node, &["logs", "--previous", "talker"]).await;
    assert!(!missing.status.success());
    let output_text = text(&missing.stderr);
    assert!(
        output_text.contains("previous terminated container \"main\" in pod \"talker\" not found"),
        "{output_text}"
    );

    let exec = run(&node, &["exec", "talker", "--", "sh", "-c", "echo out; echo err >&2; exit 7"]).await;
    assert_eq!((text(&exec.stdout).as_str(), exec.status.code()), ("out\n", Some(7)), "{exec:?}");
    assert!(text(&exec.stderr).starts_with("err\n"), "{exec:?}");
    let mut cat = kubectl(&node, &["exec", "-i", "talker", "--", "cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = cat.stdin.take().unwrap();
    stdin.write_all(b"through and back").await.unwrap();
    drop(stdin);
    let output = tokio::time::timeout(LONG, cat.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(text(&output.stdout), "through and back");
    let none = run(&node, &["exec", "talker", "-c", "nobody", "--", "true"]).await;
    assert!(!none.status.success());
    node.down().await;
}

async fn sleeper(node: &Node, name: &str) -> quintlet_e2e::Seen {
    node.api().create_pod(pods::bound(pods::sleeper(name)));
    node.wait_ready(name).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_attaches_reads_terminated_containers_and_is_audited() {
    let node = Node::start(options("node-api-attach")).await;
    // Echoes its input, exits on a keyword, and is restarted. It exits a moment after its last line:
    // containerd 1.6 drops unread output when a container exits.
    let script =
        "echo run; while read line; do echo heard $line; [ $line != bye ] || { sleep 1; exit 3; }; done";
    let mut pod = pods::bound(pods::script("echo", script));
    pod["spec"]["containers"][0]["stdin"] = json!(true);
    node.api().create_pod(pod);
    node.wait_ready("echo").await;
    let mut attach = kubectl(&node, &["attach", "-i", "echo"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = attach.stdin.take().unwrap();
    let mut lines = BufReader::new(attach.stdout.take().unwrap()).lines();
    // Input before the streams exist is not lost. The response shows that they exist.
    stdin.write_all(b"hello\n").await.unwrap();
    let line = tokio::time::timeout(LONG, lines.next_line()).await.expect("an answer").unwrap();
    assert_eq!(line.as_deref(), Some("heard hello"));
    stdin.write_all(b"bye\n").await.unwrap();
    drop(stdin);
    tokio::time::timeout(LONG, attach.wait()).await.expect("attach ends with the container").unwrap();

    until("the log of the instance before", LONG, async || {
        let output = run(&node, &["logs", "--previous", "echo"]).await;
        if text(&output.stdout) == "run\nheard hello\nheard bye\n" { Ok(()) } else { Err(output) }
    })
    .await;

    let log = node.log("node-api");
    let line = log.lines().find(|l| l.contains("action=attach")).unwrap_or_else(|| panic!("{log}"));
    let container = "container=main";
    for part in
        ["audit", "kube-apiserver-kubelet-client", "echo", "default", container, "allowed", "code=101"]
    {
        assert!(line.contains(part), "{part}: {line}");
    }
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_mebibytes_pass_through_exec_unchanged() {
    let node = Node::start(options("node-api-cp")).await;
    sleeper(&node, "store").await;
    let (there, back) = (node.scratch().join("there"), node.scratch().join("back"));
    // Random data, which cannot be compressed.
    let mut noise = std::fs::File::open("/dev/urandom").unwrap();
    let mut file = std::fs::File::create(&there).unwrap();
    std::io::copy(&mut std::io::Read::take(&mut noise, 100 << 20), &mut file).unwrap();
    let [there, back] = [&there, &back].map(|p| p.to_str().unwrap());
    let into = run(&node, &["cp", there, "store:/tmp/file"]).await;
    assert!(into.status.success(), "{into:?}");
    let inside = run(&node, &["exec", "store", "--", "sha256sum", "/tmp/file"]).await;
    let outside = Command::new("sha256sum").arg(there).output().await.unwrap();
    let sum = |o: &Output| text(&o.stdout).split(' ').next().unwrap_or_default().to_owned();
    assert_eq!((sum(&inside), sum(&inside).len()), (sum(&outside), 64));
    let out_of = run(&node, &["cp", "store:/tmp/file", back]).await;
    assert!(out_of.status.success(), "{out_of:?}");
    let returned = Command::new("sha256sum").arg(back).output().await.unwrap();
    assert_eq!(sum(&returned), sum(&outside));
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_connections_pass_through_one_port_forward() {
    let node = Node::start(options("node-api-port-forward")).await;
    let script = "echo hello > /tmp/index.html; trap 'exit 0' TERM; httpd -f -p 8080 -h /tmp & wait";
    node.api().create_pod(pods::bound(pods::script("web", script)));
    node.wait_ready("web").await;
    let mut forward = kubectl(&node, &["port-forward", "pod/web", ":8080"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(forward.stdout.take().unwrap()).lines();
    // `Forwarding from 127.0.0.1:40001 -> 8080`
    let line = tokio::time::timeout(LONG, lines.next_line()).await.unwrap().unwrap().unwrap();
    let port: u16 = line.split([':', ' ']).nth(3).unwrap().parse().unwrap_or_else(|_| panic!("{line}"));
    until("the web server through the port", LONG, async || fetch(port).await).await;
    let all = futures::future::join_all((0..100).map(|_| fetch(port))).await;
    let good = all.iter().filter(|page| page.as_deref() == Ok("hello\n")).count();
    assert_eq!(good, 100, "{:?}", all.iter().find(|p| p.is_err()));
    forward.kill().await.unwrap();
    node.down().await;
}

async fn fetch(port: u16) -> Result<String, String> {
    quintlet_e2e::page("127.0.0.1", port, "/")
        .await
        .map_err(|e| e.to_string())
        .and_then(|page| if page.is_empty() { Err("nothing".to_owned()) } else { Ok(page) })
}

/// Waits until one channel has received a text, and returns all of it.
async fn channel<S>(socket: &mut S, wanted: u8, until: &str) -> String
where
    S: futures::Stream<Item = Result<Message, tokio_tungstenite::tungstenite::Error>> + Unpin,
{
    let mut got = String::new();
    let reading = async {
        while !got.contains(until) {
            match socket.next().await {
                Some(Ok(Message::Binary(data))) if data.first() == Some(&wanted) => {
                    got.push_str(&text(&data[1..]));
                }
                Some(Ok(_)) => {}
                other => panic!("{until:?} did not come on channel {wanted}, but {got:?}, then {other:?}"),
            }
        }
    };
    tokio::time::timeout(LONG, reading).await.unwrap_or_else(|_| panic!("no {until:?}"));
    got
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_web_socket_client_sends_input_resizes_and_gets_the_exit_code() {
    let node = Node::start(options("node-api-websocket")).await;
    sleeper(&node, "shell").await;
    let address = node.api().url().replace("http://", "");
    let path =
        "api/v1/namespaces/default/pods/shell/exec?container=main&stdin=true&stdout=true&tty=true&command=sh";
    let mut request = format!("ws://{address}/{path}").into_client_request().unwrap();
    request.headers_mut().insert("sec-websocket-protocol", "v4.channel.k8s.io".parse().unwrap());
    let stream = TcpStream::connect(&address).await.unwrap();
    let (mut socket, answer) = tokio_tungstenite::client_async(request, stream).await.unwrap();
    assert_eq!(answer.headers()["sec-websocket-protocol"], "v4.channel.k8s.io");
    let message = |channel: u8, text: &str| Message::Binary([&[channel], text.as_bytes()].concat().into());
    socket.send(message(4, r#"{"Width":123,"Height":45}"#)).await.unwrap();
    // The runtime resizes asynchronously, so the command waits for the size.
    let ask = "until [ \"$(stty size)\" = '45 123' ]; do sleep 0.1; done; echo size $(stty size)\n";
    socket.send(message(0, ask)).await.unwrap();
    channel(&mut socket, 1, "size 45 123").await;
    socket.send(message(0, "exit 7\n")).await.unwrap();
    let status = channel(&mut socket, 3, "}").await;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    assert_eq!(status["reason"], "NonZeroExitCode", "{status}");
    assert_eq!(status["details"]["causes"][0]["message"], "7", "{status}");
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_every_line_once_across_rotations() {
    let node = Node::start(options("node-api-follow")).await;
    // Exits on request with all lines on disk; see above for containerd 1.6.
    let script = "echo begin; until [ -e /go/begin ]; do sleep 0.1; done; \
                  i=0; while [ $i -lt 20000 ]; do \
                    echo line $i; i=$((i+1)); [ $((i%100)) -gt 0 ] || sleep 0.01; \
                  done; \
                  until [ -e /go/end ]; do sleep 0.1; done";
    let scratch = node.scratch();
    let go = async |name: &str| tokio::fs::write(scratch.join(name), "").await.unwrap();
    let mut pod = pods::bound(pods::with_dir(pods::script("counter", script), &scratch, "/go"));
    pod["spec"]["restartPolicy"] = json!("Never");
    node.api().create_pod(pod);
    let seen = node.wait_ready("counter").await;
    let follower = Follower::start(kubectl(&node, &["logs", "-f", "counter"])).await;
    go("begin").await;
    let dir = node.pod_logs_dir().join(format!("default_counter_{}", seen.uid())).join("main");
    let id = seen.container("main").id.trim_start_matches("containerd://").to_owned();
    let mut rotated = 0;
    until("the last line on disk", LONG, async || {
        let live = dir.join("0.log");
        if rotated < 8 && std::fs::metadata(&live).is_ok_and(|m| m.len() > 1000) {
            rotated += 1;
            std::fs::rename(&live, dir.join(format!("0.log.20261121-00000{rotated}"))).unwrap();
            let request = ReopenContainerLogRequest { container_id: id.clone() };
            RuntimeServiceClient::new(node.cri()).reopen_container_log(request).await.unwrap();
        }
        let files = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path());
        let last =
            files.map(|file| std::fs::read_to_string(file).unwrap()).any(|t| t.contains("line 19999\n"));
        if last { Ok(()) } else { Err(format!("{rotated} rotations")) }
    })
    .await;
    go("end").await;
    assert!(rotated > 1, "the log was rotated {rotated} times only");
    let all = follower.rest(LONG).await;
    let want: String = (0..20_000).map(|i| format!("line {i}\n")).collect();
    let first_wrong = all.lines().zip(want.lines()).position(|(a, b)| a != b);
    assert!(all == want, "{} lines, the first wrong is {first_wrong:?}", all.lines().count());
    node.down().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_follower_gets_every_line_once_while_quintlet_rotates_compresses_and_deletes() {
    const KEPT: usize = 5;
    let flags = [
        "--container-log-max-size=20Ki".to_owned(),
        format!("--container-log-max-files={KEPT}"),
        "--container-log-monitor-interval=3s".to_owned(),
    ];
    let extra = flags.map(|flag| ("pod-sync", flag)).to_vec();
    let node = Node::start(Options { extra, ..options("node-api-rotation") }).await;
    // Counts until it is stopped, and exits with all lines on disk; see above for containerd 1.6.
    let script = "echo begin; until [ -e /go/begin ]; do sleep 0.1; done; \
                  i=0; while [ ! -e /go/enough ]; do \
                    echo a line of some length, number $i; i=$((i+1)); [ $((i%100)) -gt 0 ] || sleep 0.05; \
                  done; \
                  echo $i > /go/counted; until [ -e /go/end ]; do sleep 0.1; done";
    let scratch = node.scratch();
    let go = async |name: &str| tokio::fs::write(scratch.join(name), "").await.unwrap();
    let mut pod = pods::bound(pods::with_dir(pods::script("counter", script), &scratch, "/go"));
    pod["spec"]["restartPolicy"] = json!("Never");
    node.api().create_pod(pod);
    let seen = node.wait_ready("counter").await;
    let follower = Follower::start(kubectl(&node, &["logs", "-f", "counter"])).await;

    go("begin").await;
    let dir = node.pod_logs_dir().join(format!("default_counter_{}", seen.uid())).join("main");
    let names = || -> Vec<String> {
        let entries = std::fs::read_dir(&dir).unwrap().map(|e| e.unwrap().file_name());
        entries.map(|name| name.into_string().unwrap()).collect()
    };
    let mut rotated = std::collections::BTreeSet::new();
    until("files that were compressed, and more of them than are kept", LONG, async || {
        let there = names();
        let compressed = |name: &&String| name.ends_with(".gz");
        rotated.extend(there.iter().filter(compressed).cloned());
        let is_gone = rotated.iter().any(|name| !there.contains(name));
        if rotated.len() > KEPT && is_gone { Ok(()) } else { Err((rotated.clone(), there)) }
    })
    .await;
    assert!(names().len() <= KEPT + 1, "one may just be compressed: {:?}", names());

    go("enough").await;
    let counted: usize = until("the number of lines", LONG, async || {
        let counted = tokio::fs::read_to_string(scratch.join("counted")).await.unwrap_or_default();
        counted.trim().parse().map_err(|e| format!("{e}: {counted:?}"))
    })
    .await;
    let last = format!("number {}\n", counted - 1);
    until("the last line on disk", LONG, async || {
        let live = std::fs::read_to_string(dir.join("0.log")).unwrap_or_default();
        let plain = names().into_iter().filter(|n| !n.ends_with(".gz") && n != "0.log");
        let before =
            plain.map(|n| std::fs::read_to_string(dir.join(n)).unwrap_or_default()).collect::<String>();
        if live.ends_with(&last) || before.contains(&last) { Ok(()) } else { Err(names()) }
    })
    .await;
    go("end").await;
    let all = follower.rest(LONG).await;
    let number = |line: &str| line.rsplit(' ').next().and_then(|n| n.parse::<usize>().ok());
    let wrong = all.lines().enumerate().find(|(want, line)| number(line) != Some(*want));
    assert_eq!((all.lines().count(), wrong), (counted, None), "lines are lost, doubled or out of order");
    node.down().await;
}
