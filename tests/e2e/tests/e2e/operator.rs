//! quintctl's exec, attach and port-forward against a real runtime.

use std::process::{Output, Stdio};

use parking_lot::Mutex;
use quintlet_e2e::{LONG, Node, Options, Terminal, pods, until};
use quintlet_proto::debug::v1::MetricsRequest;
use quintlet_proto::debug::v1::debug_client::DebugClient;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

/// Runs quintctl with this standard input.
async fn run(node: &Node, args: &[&str], input: &[u8]) -> Output {
    let mut child = node
        .quintctl(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let all = async {
        let write = async {
            // A command that does not read its input closes it.
            let _ = stdin.write_all(input).await;
            drop(stdin);
        };
        tokio::join!(write, child.wait_with_output()).1.unwrap()
    };
    tokio::time::timeout(LONG, all).await.unwrap_or_else(|_| panic!("{args:?} does not end"))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

async fn in_a_terminal(node: &Node) {
    let exec = node.quintctl(&["exec", "-it", "web", "--", "sh"]);
    let mut terminal = Terminal::open(exec.as_std(), 24, 80);
    terminal.shows("/ # ").await;
    terminal.types("stty size\n");
    terminal.shows("24 80").await;
    terminal.resize(50, 132);
    // The new size reaches the shell asynchronously.
    terminal.types_until("stty size\n", "50 132").await;
    // Ctrl-C goes to the shell, not to quintctl.
    terminal.types("echo star''ted; sleep 1000\n");
    terminal.shows("started").await;
    terminal.types("\x03");
    terminal.types("exit 7\n");
    assert_eq!(terminal.ends().await, Some(7));
}

async fn forwarded(node: &Node) {
    let mut child =
        node.quintctl(&["port-forward", "web", ":8080", ":9"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut addresses = Vec::new();
    for port in ["8080", "9"] {
        let line = tokio::time::timeout(LONG, lines.next_line()).await.unwrap().unwrap().unwrap();
        let (address, target) = line.strip_prefix("Forwarding from ").unwrap().split_once(" -> ").unwrap();
        assert_eq!(target, port);
        addresses.push(address.to_owned());
    }
    let get = async |path: &str| {
        let mut tcp = tokio::net::TcpStream::connect(&addresses[0]).await.unwrap();
        tcp.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await.unwrap();
        let mut reply = Vec::new();
        tcp.read_to_end(&mut reply).await.unwrap();
        reply
    };
    let pages = (0..40).map(|n| get(if n % 4 == 0 { "/big" } else { "/index.html" }));
    let pages = tokio::time::timeout(LONG, futures::future::join_all(pages)).await.expect("all pages come");
    for (n, page) in pages.iter().enumerate() {
        let page = text(page);
        let body = page.split_once("\r\n\r\n").unwrap().1;
        if n % 4 == 0 {
            assert_eq!((body.len(), body.trim_matches('0')), (1 << 20, ""), "page {n}");
        } else {
            assert_eq!(body, "hello\n", "page {n}");
        }
    }
    // No process listens on this port: the connection ends with an error, and the others continue.
    let mut refused = tokio::net::TcpStream::connect(&addresses[1]).await.unwrap();
    let mut nothing = Vec::new();
    let _ = tokio::time::timeout(LONG, refused.read_to_end(&mut nothing)).await.expect("it ends");
    let printed = tokio::time::timeout(LONG, lines.next_line()).await.unwrap().unwrap().unwrap();
    assert!(printed.starts_with("port 9: ") && printed.contains("refused"), "{printed}");
    assert!(text(&get("/index.html").await).ends_with("hello\n"));
}

/// Each service writes lines of the level that it was asked for, without a restart.
async fn change_log_filters(node: &Node) {
    for service in ["cri-proxy", "pleg-service", "probe-service", "status-reporter", "pod-sync"] {
        let output = run(node, &["-o", "json", "log-level", service], b"").await;
        assert_eq!(output.status.code(), Some(0), "{service}: {}", text(&output.stderr));
        let before: Value = serde_json::from_slice(&output.stdout).unwrap();
        let filter = before[0]["filter"].as_str().unwrap().to_owned();
        let wanted = format!("{filter},h2=off");
        let output = run(node, &["log-level", service, &wanted], b"").await;
        assert!(text(&output.stdout).contains(&format!("before: {filter}")), "{}", text(&output.stdout));
        assert!(node.log(service).contains("log filter changed"), "{service}");
    }
    assert!(!node.log("pod-sync").contains(" DEBUG "), "{}", node.log("pod-sync"));
    run(node, &["log-level", "pod-sync", "debug"], b"").await;
    node.pod_manifest(&pods::sleeper("seen"));
    node.wait_ready("seen").await;
    assert!(node.log("pod-sync").contains("DEBUG"), "{}", node.log("pod-sync"));
    let output = run(node, &["log-level", "pod-sync", "a=b=c"], b"").await;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stderr).contains("failed to parse the log filter \"a=b=c\""),
        "{}",
        text(&output.stderr)
    );
}

/// A service under load shows where it uses the CPU, to one operator at a time.
async fn take_profiles(node: &Node) {
    let socket = node.paths().podsync();
    let load = tokio::spawn(async move {
        let mut client = DebugClient::new(quintlet_kit::socket::channel(socket));
        loop {
            let mut metrics = client.metrics(MetricsRequest {}).await.unwrap().into_inner();
            while metrics.message().await.unwrap().is_some() {}
        }
    });
    let output = run(node, &["profile", "pod-sync", "--seconds=2", "--format=folded"], b"").await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let folded = text(&output.stdout);
    let samples = |line: &str| line.rsplit_once(' ').unwrap().1.parse::<u32>().unwrap();
    assert!(folded.lines().map(samples).sum::<u32>() >= 10, "{folded}");
    // The whole stack: from the main function to the code that makes the answer.
    let is_whole =
        |line: &&str| line.contains("pod_sync::process::main") && line.contains("prometheus_client::");
    assert!(folded.lines().filter(is_whole).map(samples).sum::<u32>() >= 5, "{folded}");

    let scratch = node.scratch();
    let [svg, pprof] = ["p.svg", "p.pb.gz"].map(|name| scratch.join(name).display().to_string());
    let output = run(node, &["profile", "pod-sync", "--seconds=1", "--file", &svg], b"").await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let drawn = std::fs::read_to_string(&svg).unwrap();
    assert!(drawn.contains("pod-sync: ") && drawn.contains("prometheus_client::"), "{drawn}");
    let line = ["profile", "pod-sync", "--seconds=1", "--format=pprof", "--file", &pprof];
    let output = run(node, &line, b"").await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(std::fs::read(&pprof).unwrap()[..2], [0x1f, 0x8b]);
    load.abort();

    let start =
        || node.quintctl(&["profile", "pod-sync", "--seconds=60"]).stdout(Stdio::piped()).spawn().unwrap();
    let profile = async || {
        let output = run(node, &["profile", "pod-sync", "--seconds=1", "--format=folded"], b"").await;
        format!("{:?} {}", output.status.code(), text(&output.stderr))
    };
    let first = Mutex::new(start());
    until("a refusal", LONG, async || {
        {
            let mut first = first.lock();
            // The shorter one may have been first, and the longer one refused.
            if first.try_wait().unwrap().is_some() {
                *first = start();
            }
        }
        let shown = profile().await;
        let refused = "Some(1) quintctl: pod-sync: another profile of this process is being taken";
        if shown.starts_with(refused) { Ok(()) } else { Err(shown) }
    })
    .await;
    first.into_inner().kill().await.unwrap();
    until("another profile", LONG, async || {
        let shown = profile().await;
        if shown.starts_with("Some(0)") { Ok(()) } else { Err(shown) }
    })
    .await;
    for (line, code, want) in [
        (&["profile", "pod-sync", "--seconds=61"][..], 64, "61 is not in 1..=60"),
        (&["profile", "pod-sync", "--heap"], 1, "this build has no heap profile"),
        (&["profile", "probe-service", "--instance=other"], 1, "no instance other"),
    ] {
        let output = run(node, line, b"").await;
        assert_eq!(output.status.code(), Some(code), "{line:?}");
        assert!(text(&output.stderr).contains(want), "{line:?}: {}", text(&output.stderr));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_uses_logs_exec_and_port_forward() {
    let node = Node::start(Options::standalone("operator")).await;
    let web = "trap 'exit 0' TERM; mkdir /w; echo hello > /w/index.html; head -c 1048576 /dev/zero | tr '\\0' 0 > /w/big; httpd -f -p 8080 -h /w & wait";
    node.pod_manifest(&pods::script("web", web));
    let mut echo = pods::script("echo", "while read line; do echo got $line; done; sleep 1000");
    echo["spec"]["containers"][0]["stdin"] = json!(true);
    node.pod_manifest(&echo);
    node.wait_ready("web").await;
    node.wait_ready("echo").await;

    // The three streams and the exit code.
    let script = "cat; echo to stderr >&2; exit 42";
    let output = run(&node, &["exec", "-i", "web", "--", "sh", "-c", script], b"to stdin\n").await;
    assert_eq!(
        (output.status.code(), text(&output.stdout), text(&output.stderr)),
        (Some(42), "to stdin\n".into(), "to stderr\n".into())
    );
    // The end of standard input arrives after all of its data.
    let big = vec![b'x'; 3 << 20];
    let output = run(&node, &["exec", "-i", "web", "-c", "main", "--", "wc", "-c"], &big).await;
    assert_eq!((output.status.code(), text(&output.stdout).trim()), (Some(0), "3145728"));
    let output = run(&node, &["exec", "web", "--", "head", "-c", "3145728", "/dev/zero"], b"").await;
    assert_eq!((output.status.code(), output.stdout.len()), (Some(0), 3 << 20));
    // Failures have a reason.
    for (args, want) in [
        (["exec", "web", "--", "/no/such/program"].as_slice(), "no such file"),
        (&["exec", "nobody", "--", "true"], "no pod \"nobody\""),
        (&["exec", "web", "-c", "x", "--", "true"], "no container \"x\""),
        (&["exec", "-it", "web", "--", "sh"], "standard input is not a terminal"),
        (&["attach", "-i", "web"], "has no standard input"),
        (&["port-forward", "nobody", "80"], "no pod \"nobody\""),
    ] {
        let output = run(&node, args, b"").await;
        assert_ne!(output.status.code(), Some(0), "{args:?}");
        assert!(text(&output.stderr).contains(want), "{args:?}: {}", text(&output.stderr));
    }
    in_a_terminal(&node).await;
    change_log_filters(&node).await;
    take_profiles(&node).await;

    let attach =
        node.quintctl(&["attach", "-i", "echo"]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut attach = attach.unwrap();
    let mut lines = BufReader::new(attach.stdout.take().unwrap()).lines();
    attach.stdin.as_mut().unwrap().write_all(b"one\ntwo\n").await.unwrap();
    for want in ["got one", "got two"] {
        let line = tokio::time::timeout(LONG, lines.next_line()).await.expect("an answer").unwrap();
        assert_eq!(line.as_deref(), Some(want));
    }
    drop(attach);
    forwarded(&node).await;
    node.down().await;
}
