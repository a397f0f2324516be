//! Calls through a complete proxy to a scripted runtime.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use cri_proxy::lists;
use cri_proxy::policy::{self, CallDecision, Class, Socket};
use cri_proxy::reply::{self, Frames};
use http_body_util::BodyExt as _;
use quintlet_cri_api::v1;
use quintlet_kit::clock::Clock;
use quintlet_kit::grant::GrantKey;
use quintlet_proto::runtime::v1 as pb;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::Semaphore;

use crate::common::{Act, Bench, eventually, failing, good, got, headers};

const START: &str = "/runtime.v1.RuntimeService/StartContainer";
/// Number of calls in flight that fills the lane of starts.
const LANE: usize = cri_proxy::adaptive::START;
const LIST: &str = "/runtime.v1.RuntimeService/ListContainers";
const EXEC: &str = "/runtime.v1.RuntimeService/ExecSync";
const EPOCH: (&str, &str) = ("quintlet-owner-epoch", "1");

fn start(id: &str) -> Bytes {
    reply::frame(&v1::StartContainerRequest { container_id: id.into() })
}

fn empty() -> Bytes {
    Bytes::from_static(&[0; 5])
}

#[tokio::test]
async fn an_unknown_method_passes_byte_identical_both_ways_with_all_metadata() {
    let bench = Bench::start().await;
    let path = "/containerd.services.content.v1.Content/Write";
    let chunks =
        vec![Bytes::from_static(b"\0\0\0\0\x02ab"), Bytes::from_static(b"\x01\xff\0\0not even a frame")];
    let head =
        headers(&[("content-type", "application/grpc+x"), ("x-a", "1"), ("x-a", "2"), ("x-b-bin", "AAH+")]);
    let tail = headers(&[("grpc-status", "0"), ("x-tail", "t"), ("x-tail", "u")]);
    bench.script.on(path, [Act::Reply(head.clone(), chunks.clone(), tail.clone())]);
    let sent = Bytes::from_static(b"\0\0\0\0\x03xyz\xff\xfe");
    let meta = [
        ("x-many", "1"),
        ("x-many", "2"),
        ("y-bin", "AAE="),
        ("quintlet-owner-epoch", "7"),
        ("user-agent", "u/1"),
    ];
    let got = bench.call(Socket::Admin, path, &meta, sent.clone()).await;

    let seen = bench.script.seen(path).pop().unwrap();
    assert_eq!(seen.body, sent);
    let mut expected = headers(&[("content-type", "application/grpc"), ("te", "trailers")]);
    expected.extend(headers(&[("x-many", "1"), ("x-many", "2"), ("y-bin", "AAE="), ("user-agent", "u/1")]));
    assert_eq!(seen.headers, expected);
    assert_eq!(got.body, chunks.concat());
    assert_eq!(got.headers, head);
    let mut trailers = got.trailers.clone().unwrap();
    assert_eq!(got.outcome(), "ok");
    assert!(got.meta("quintlet-queued-ms").parse::<u64>().is_ok());
    trailers.remove("quintlet-outcome");
    trailers.remove("quintlet-queued-ms");
    assert_eq!(trailers, tail);
}

#[tokio::test]
async fn unknown_fields_of_messages_are_forwarded_unchanged_on_every_kind_of_call() {
    let bench = Bench::start().await;
    // Field 1 is known, field 999 is unknown.
    let with_unknown = |id: &str| {
        let mut message = vec![0x0a, id.len() as u8];
        message.extend_from_slice(id.as_bytes());
        message.extend_from_slice(&[0xba, 0x3e, 3, 7, 8, 9]);
        let mut framed = vec![0, 0, 0, 0, message.len() as u8];
        framed.extend_from_slice(&message);
        Bytes::from(framed)
    };
    for (socket, method, meta) in [
        (Socket::Read, "ContainerStatus", &[][..]),
        (Socket::Sync, "StopPodSandbox", &[EPOCH]),
        (Socket::Sync, "UpdatePodSandboxResources", &[EPOCH]),
    ] {
        let path = format!("/runtime.v1.RuntimeService/{method}");
        let answer = with_unknown("answer");
        let head = headers(&[("content-type", "application/grpc")]);
        bench
            .script
            .on(&path, [Act::Reply(head.clone(), vec![answer.clone()], headers(&[("grpc-status", "0")]))]);
        let got = bench.call(socket, &path, meta, with_unknown("id")).await;
        assert_eq!(bench.script.seen(&path)[0].body, with_unknown("id"), "{method}");
        assert!(!bench.script.seen(&path)[0].headers.contains_key("quintlet-owner-epoch"), "{method}");
        assert_eq!((got.body.clone(), got.headers.clone()), (answer, head), "{method}");
        assert_eq!(got.outcome(), "ok", "{method}");
    }
}

#[tokio::test]
async fn streams_pass_frame_by_frame_in_both_directions() {
    let bench = Bench::start().await;
    let path = "/some.future.v9.Service/Talk";
    bench.script.on(path, [Act::Echo(headers(&[("grpc-status", "0"), ("x-end", "yes")]))]);
    let (sender, receiver) = tokio::sync::mpsc::channel::<Bytes>(1);
    let frames = futures::stream::unfold(receiver, |mut receiver| async move {
        let data = receiver.recv().await?;
        Some((Ok::<_, reply::BoxError>(http_body::Frame::data(data)), receiver))
    });
    let body = reply::boxed(http_body_util::StreamBody::new(frames));
    let request = reply::request(path, headers(&[("te", "trailers")]), body);
    let mut answer = bench.caller(Socket::Admin).send(request).await.unwrap().into_body();
    for word in ["one", "two", "three"] {
        sender.send(Bytes::from_static(word.as_bytes())).await.unwrap();
        assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), word);
    }
    drop(sender);
    let trailers = answer.frame().await.unwrap().unwrap().into_trailers().unwrap();
    assert_eq!(
        (&trailers["x-end"], &trailers["quintlet-outcome"]),
        (&"yes".parse().unwrap(), &"ok".parse().unwrap())
    );
}

#[tokio::test]
async fn errors_pass_with_their_details_and_get_their_outcome() {
    let bench = Bench::start().await;
    let details = "CAUSBHRlc3QaKAoadHlwZS5nb29nbGVhcGlzLmNvbS9h";
    for (code, message, outcome) in [
        ("2", "oh%20no%0A", "runtime-error"),
        ("5", "gone", "runtime-error"),
        ("14", "busy", "unknown"),
        ("4", "late", "unknown"),
        ("1", "cancelled", "unknown"),
        ("99", "not known", "runtime-error"),
    ] {
        let pairs = [
            ("grpc-status", code),
            ("grpc-message", message),
            ("grpc-status-details-bin", details),
            ("x-z", "z"),
        ];
        let head = headers(&[("content-type", "application/grpc")]);
        let mut block = head.clone();
        block.extend(headers(&pairs));
        // As one header block, and as trailers after separate response headers.
        for act in [Act::TrailersOnly(block), Act::Reply(head.clone(), vec![], headers(&pairs))] {
            bench.script.on(START, [act.clone()]);
            let got = bench.call(Socket::Sync, START, &[EPOCH], start("c")).await;
            for (name, value) in pairs {
                assert_eq!(got.meta(name), value, "{code}: {got:?}");
            }
            assert_eq!(got.trailers.is_some(), matches!(act, Act::Reply(..)), "{code}");
            assert_eq!(got.outcome(), outcome, "{code}");
        }
    }
    let reserved = "failed to reserve sandbox name \"a\": name \"a\" is reserved for \"b\"";
    let run = "/runtime.v1.RuntimeService/RunPodSandbox";
    bench.script.on(run, [failing(2, reserved)]);
    assert_eq!(bench.call(Socket::Sync, run, &[EPOCH], empty()).await.outcome(), "unknown");
}

#[tokio::test]
async fn every_method_on_every_socket_is_handled_as_in_the_policy_table() {
    let bench = Bench::start().await;
    let own = [
        ("quintlet.runtime.v1.ProxyInfo", "Get"),
        ("quintlet.runtime.v1.ProbeExec", "Exec"),
        ("quintlet.debug.v1.Debug", "Build"),
    ];
    let unknown =
        [("runtime.v1.RuntimeService", "Newer"), ("containerd.services.content.v1.Content", "Info")];
    let table = policy::TABLE.iter().map(|row| (row.service, row.method));
    let mut denied = 0;
    for (service, method) in table.chain(own).chain(unknown) {
        let path = format!("/{service}/{method}");
        // The proxy itself calls GetContainerEvents, too.
        if method != "GetContainerEvents" {
            bench.script.on(&path, [good(&v1::StartContainerRequest::default())]);
        }
        // A list is requested by stream or in one message, as the runtime supports it.
        let row = policy::TABLE.iter().find(|row| row.service == service && row.method == method);
        let sent_as = match row.and_then(lists::list_methods) {
            Some(methods) => vec![methods.list, methods.stream],
            None => vec![method],
        };
        let seen = || -> usize {
            sent_as.iter().map(|method| bench.script.seen(&format!("/{service}/{method}")).len()).sum()
        };
        for socket in Socket::ALL {
            let before = seen();
            let got = bench.call(socket, &path, &[EPOCH], empty()).await;
            let forwarded = seen() > before;
            let place = format!("{service}/{method} on {}", socket.name());
            match policy::decide(socket, service, method) {
                CallDecision::Local => assert!(!forwarded && got.code() != "12", "{place}: {got:?}"),
                CallDecision::Forward(_) | CallDecision::Passthrough => {
                    assert!(forwarded || method == "GetContainerEvents", "{place}: {got:?}");
                }
                CallDecision::WrongSocket | CallDecision::Unknown => {
                    denied += 1;
                    assert_eq!((got.code(), got.outcome()), ("7", "not-dispatched"), "{place}: {got:?}");
                    assert!(got.meta("grpc-message").contains(method), "{place}: {got:?}");
                    assert!(!forwarded || method == "GetContainerEvents" || method == "Version", "{place}");
                }
            }
        }
    }
    assert!(denied > 50, "{denied}");
    let metrics = quintlet_telemetry::metrics::text();
    for (method, socket) in [("ExecSync", Socket::Probe), ("RunPodSandbox", Socket::Read)] {
        let counter =
            format!("quintlet_cri_denied_total{{method=\"{method}\",socket=\"{}\"}} ", socket.name());
        let count = metrics.lines().find_map(|line| line.strip_prefix(&counter)).unwrap_or("0");
        assert!(count.parse::<u64>().unwrap() >= 1, "{counter}{count}");
    }
}

#[tokio::test]
async fn mutations_without_epoch_of_an_old_epoch_or_too_late_never_reach_the_runtime() {
    let bench = Bench::start().await;
    bench.script.on(START, [good(&v1::StartContainerResponse {})]);
    let late = (bench.clock.boot() - Duration::from_millis(1)).as_nanos().to_string();
    let soon = (bench.clock.boot() + Duration::from_secs(60)).as_nanos().to_string();
    type Meta<'a> = &'a [(&'static str, &'a str)];
    let cases: &[(Meta<'_>, &str, &str)] = &[
        (&[], "9", "not-dispatched"),
        (&[("quintlet-owner-epoch", "5"), ("quintlet-deadline-boottime-ns", &soon)], "0", "ok"),
        (&[("quintlet-owner-epoch", "4")], "9", "not-dispatched"),
        (&[("quintlet-owner-epoch", "x")], "3", "not-dispatched"),
        (&[("quintlet-owner-epoch", "5"), ("quintlet-deadline-boottime-ns", &late)], "4", "not-dispatched"),
        (&[("quintlet-owner-epoch", "5")], "0", "ok"),
    ];
    for (meta, code, outcome) in cases {
        let got = bench.call(Socket::Sync, START, meta, start("c")).await;
        assert_eq!((got.code(), got.outcome()), (*code, *outcome), "{meta:?}: {got:?}");
    }
    assert_eq!(bench.script.seen(START).len(), 2);
    for meta in [&[][..], &[("quintlet-owner-epoch", "99")]] {
        let got = bench.call(Socket::Admin, START, meta, start("c")).await;
        assert_eq!(got.outcome(), "ok", "root needs no epoch: {got:?}");
    }
    let got = bench.call(Socket::Sync, START, &[("quintlet-owner-epoch", "5")], start("c")).await;
    assert_eq!(got.outcome(), "ok", "an operator's epoch shuts out no owner: {got:?}");
}

#[tokio::test]
async fn identical_concurrent_calls_run_once_and_different_ones_with_the_same_key_are_refused() {
    let bench = Arc::new(Bench::start().await);
    let gate = Arc::new(Semaphore::new(0));
    let path = "/runtime.v1.RuntimeService/CreateContainer";
    let answer = v1::CreateContainerResponse { container_id: "new".into() };
    bench.script.on(path, [Act::After(gate.clone(), Box::new(good(&answer)))]);
    let create = |command: &str| {
        let metadata = v1::ContainerMetadata { name: "web".into(), attempt: 0 };
        let config = v1::ContainerConfig {
            metadata: Some(metadata),
            command: vec![command.into()],
            ..Default::default()
        };
        reply::frame(&v1::CreateContainerRequest {
            pod_sandbox_id: "s".into(),
            config: Some(config),
            ..Default::default()
        })
    };
    let call = |body: Bytes| {
        let bench = bench.clone();
        tokio::spawn(async move { bench.call(Socket::Sync, path, &[EPOCH], body).await })
    };
    let joined_before = bench.metrics.joined.get();
    let first = call(create("a"));
    eventually("dispatch", async || (bench.script.seen(path).len() == 1).then_some(())).await;
    let second = call(create("a"));
    eventually("join", async || (bench.metrics.joined.get() > joined_before).then_some(())).await;
    let other = call(create("b")).await.unwrap();
    assert_eq!((other.code(), other.outcome()), ("10", "not-dispatched"));
    gate.add_permits(10);
    let (first, second) = (first.await.unwrap(), second.await.unwrap());
    assert_eq!(first.body, reply::frame(&answer));
    assert_eq!(first.body, second.body);
    assert_eq!(bench.script.seen(path).len(), 1);
    assert_eq!(call(create("a")).await.unwrap().outcome(), "ok");
    assert_eq!(bench.script.seen(path).len(), 2, "what is over does not answer for what comes later");
}

#[tokio::test]
async fn a_mutation_continues_if_its_caller_disconnects_and_an_identical_one_joins_it() {
    let bench = Arc::new(Bench::start().await);
    let gate = Arc::new(Semaphore::new(0));
    bench.script.on(START, [Act::After(gate.clone(), Box::new(good(&v1::StartContainerResponse {})))]);
    let caller = {
        let bench = bench.clone();
        tokio::spawn(async move { bench.call(Socket::Sync, START, &[EPOCH], start("gone")).await })
    };
    eventually("dispatch", async || (bench.script.seen(START).len() == 1).then_some(())).await;
    caller.abort();
    let _ = caller.await;
    let before = bench.metrics.joined.get();
    let again = {
        let bench = bench.clone();
        tokio::spawn(async move { bench.call(Socket::Sync, START, &[EPOCH], start("gone")).await })
    };
    eventually("join", async || (bench.metrics.joined.get() > before).then_some(())).await;
    gate.add_permits(1);
    assert_eq!(again.await.unwrap().outcome(), "ok");
    assert_eq!(bench.script.seen(START).len(), 1);
}

#[tokio::test]
async fn a_repeated_exec_gets_the_earlier_result_or_runs_and_never_runs_twice() {
    let boot = |seconds| Duration::from_secs(seconds);
    let clock = Clock::fixed(Clock::system().wall(), boot(1000));
    let bench = Bench::with("fake", "1", 64, clock.clone()).await;
    let answer = |exit_code| good(&v1::ExecSyncResponse { exit_code, ..Default::default() });
    bench.script.on(EXEC, [answer(7), answer(8)]);
    let hook = v1::ExecSyncRequest { container_id: "c".into(), cmd: vec!["hook".into()], timeout: 0 };
    let call = async |began: u64| {
        let began = boot(began).as_nanos().to_string();
        let meta = [EPOCH, ("quintlet-join-only", &*began)];
        bench.call(Socket::Sync, EXEC, &meta, reply::frame(&hook)).await
    };
    let early = call(999).await;
    assert_eq!(
        (early.code(), early.outcome()),
        ("5", "not-dispatched"),
        "it may have come to an earlier proxy"
    );
    clock.advance(boot(2));
    let first = call(1001).await;
    assert_eq!((first.outcome(), bench.script.seen(EXEC).len()), ("ok", 1), "it never came");
    let again = call(1001).await;
    assert_eq!((&again.body, bench.script.seen(EXEC).len()), (&first.body, 1), "it ended");
    clock.advance(boot(2));
    let another = call(1003).await;
    assert_ne!(another.body, first.body);
    assert_eq!(bench.script.seen(EXEC).len(), 2, "one that begins later is another");
}

#[tokio::test]
async fn a_call_whose_deadline_passes_in_the_queue_is_not_run() {
    let clock = Clock::fixed(Clock::system().wall(), Duration::from_secs(1000));
    let bench = Arc::new(Bench::with("fake", "1", 64, clock.clone()).await);
    let gate = Arc::new(Semaphore::new(0));
    bench.script.on(START, [Act::After(gate.clone(), Box::new(good(&v1::StartContainerResponse {})))]);
    let call = |id: String, deadline: Duration| {
        let bench = bench.clone();
        tokio::spawn(async move {
            let deadline = (Duration::from_secs(1000) + deadline).as_nanos().to_string();
            let meta = [EPOCH, ("quintlet-deadline-boottime-ns", &*deadline)];
            bench.call(Socket::Sync, START, &meta, start(&id)).await
        })
    };
    let first: Vec<_> = (0..LANE).map(|i| call(i.to_string(), Duration::from_secs(3600))).collect();
    eventually("a full lane", async || (bench.script.seen(START).len() == LANE).then_some(())).await;
    // Simulates a process that was stopped: time advances while the call waits for its slot.
    let stopped = call("stopped".into(), Duration::from_secs(60));
    tokio::time::sleep(Duration::from_millis(100)).await;
    clock.advance(Duration::from_secs(120));
    gate.add_permits(1);
    let got = stopped.await.unwrap();
    assert_eq!((got.code(), got.outcome()), ("4", "not-dispatched"), "{got:?}");
    assert!(got.meta("quintlet-queued-ms").parse::<u64>().unwrap() >= 50, "{got:?}");
    gate.add_permits(LANE);
    for call in first {
        assert_eq!(call.await.unwrap().outcome(), "ok");
    }
    assert_eq!(bench.script.seen(START).len(), LANE);
}

#[tokio::test]
async fn a_queued_call_fails_at_its_deadline() {
    let bench = Arc::new(Bench::start().await);
    bench.script.on(START, [Act::Hang]);
    for i in 0..LANE {
        let bench = bench.clone();
        tokio::spawn(async move { bench.call(Socket::Sync, START, &[EPOCH], start(&i.to_string())).await });
    }
    eventually("a full lane", async || (bench.script.seen(START).len() == LANE).then_some(())).await;
    let deadline = (bench.clock.boot() + Duration::from_millis(100)).as_nanos().to_string();
    let meta = [EPOCH, ("quintlet-deadline-boottime-ns", &*deadline)];
    let got = bench.call(Socket::Sync, START, &meta, start("late")).await;
    assert_eq!((got.code(), got.outcome()), ("4", "not-dispatched"), "{got:?}");
}

#[tokio::test]
async fn a_runtime_that_is_down_hangs_or_restarts_causes_the_right_outcome() {
    let mut bench = Bench::start().await;
    bench.script.on(START, [good(&v1::StartContainerResponse {})]);
    bench.script.on(LIST, [good(&v1::ListContainersResponse::default())]);
    assert_eq!(bench.call(Socket::Sync, START, &[EPOCH], start("c")).await.outcome(), "ok");
    bench.down();
    for (socket, path, meta, body) in
        [(Socket::Sync, START, &[EPOCH][..], start("c")), (Socket::Read, LIST, &[], empty())]
    {
        let before = tokio::time::Instant::now();
        let got = bench.call(socket, path, meta, body).await;
        assert_eq!((got.code(), got.outcome()), ("14", "not-dispatched"), "{got:?}");
        assert!(
            got.trailers.is_none() && before.elapsed() < Duration::from_millis(500),
            "{:?}",
            before.elapsed()
        );
        assert!(got.meta("grpc-message").contains("runtime.sock"), "{got:?}");
    }
    bench.up();
    let back = tokio::time::Instant::now();
    eventually("service again", async || {
        let got = bench.call(Socket::Sync, START, &[EPOCH], start("c")).await;
        (got.outcome() == "ok").then_some(())
    })
    .await;
    assert!(back.elapsed() < Duration::from_secs(1), "{:?}", back.elapsed());

    bench.script.on(START, [Act::Hang]);
    let before = tokio::time::Instant::now();
    let got = bench.call(Socket::Sync, START, &[EPOCH, ("grpc-timeout", "200m")], start("c")).await;
    assert_eq!((got.code(), got.outcome()), ("4", "unknown"), "{got:?}");
    assert!((190..2000).contains(&before.elapsed().as_millis()), "{:?}", before.elapsed());
}

#[tokio::test]
async fn after_a_lost_connection_a_mutation_is_unknown_and_a_read_is_repeated() {
    let bench = Bench::start().await;
    bench.script.on(START, [Act::Cut]);
    let got = bench.call(Socket::Sync, START, &[EPOCH], start("c")).await;
    assert_eq!((got.code(), got.outcome()), ("14", "unknown"), "{got:?}");
    assert_eq!(bench.script.seen(START).len(), 1);
    bench.script.on(LIST, [Act::Cut, good(&v1::ListContainersResponse::default())]);
    assert_eq!(bench.call(Socket::Read, LIST, &[], empty()).await.outcome(), "ok");
    assert_eq!(bench.script.seen(LIST).len(), 2);
}

#[tokio::test]
async fn stops_do_not_hold_their_slots_while_the_runtime_waits() {
    let bench = Arc::new(Bench::start().await);
    let stop = "/runtime.v1.RuntimeService/StopContainer";
    bench.script.on(stop, [Act::Hang]);
    for i in 0..50 {
        let bench = bench.clone();
        tokio::spawn(async move {
            let body = reply::frame(&v1::StopContainerRequest { container_id: i.to_string(), timeout: 30 });
            bench.call(Socket::Sync, stop, &[EPOCH], body).await
        });
    }
    eventually("fifty stops in flight", async || (bench.script.seen(stop).len() == 50).then_some(())).await;
}

#[tokio::test]
async fn the_longest_timeouts_of_a_stop_or_a_caller_are_accepted() {
    let bench = Bench::start().await;
    let stop = "/runtime.v1.RuntimeService/StopContainer";
    let answered = || good(&v1::StopContainerResponse::default());
    bench.script.on(stop, [answered(), answered(), answered()]);
    for (n, timeout) in [i64::MAX, i64::MAX - 1, i64::MIN].into_iter().enumerate() {
        let body = reply::frame(&v1::StopContainerRequest { container_id: n.to_string(), timeout });
        let got = bench.call(Socket::Sync, stop, &[EPOCH], body).await;
        assert_eq!(got.outcome(), "ok", "{timeout}");
    }
    bench.script.on(LIST, [good(&v1::ListContainersResponse::default())]);
    let longest = [("grpc-timeout", "99999999H")];
    assert_eq!(bench.call(Socket::Read, LIST, &longest, empty()).await.outcome(), "ok");
}

#[tokio::test]
async fn a_grant_of_a_key_that_replaced_the_known_one_is_accepted() {
    let bench = Bench::start().await;
    let path = bench.dir.path().join("keys/grant.key");
    let command = vec!["true".to_owned()];
    let code = async |grant: Vec<u8>| {
        let (container_id, command) = ("c".to_owned(), command.clone());
        let request = pb::ProbeExecRequest { container_id, command, timeout_seconds: 1, grant };
        let method = "/quintlet.runtime.v1.ProbeExec/Exec";
        bench.call(Socket::Probe, method, &[], reply::frame(&request)).await.code().to_owned()
    };
    let done = good(&v1::ExecSyncResponse::default());
    bench.script.on(EXEC, [done.clone(), done.clone(), done]);
    let first = GrantKey::load_or_create(&path).unwrap().sign("c", &command, 1);
    assert_eq!(code(first.clone()).await, "0");
    // The directory is removed, and a restarted pod-sync creates another key.
    std::fs::remove_file(&path).unwrap();
    let second = GrantKey::load_or_create(&path).unwrap().sign("c", &command, 1);
    assert_eq!(code(second.clone()).await, "0");
    assert_eq!(code(first).await, "7", "the key of the grant is gone");
    // A wrong grant neither replaces the known key nor creates one.
    std::fs::remove_file(&path).unwrap();
    assert_eq!(code(vec![1]).await, "7");
    assert!(!path.exists());
    assert_eq!(code(second).await, "0");
}

#[tokio::test]
async fn a_probe_exec_runs_exactly_the_granted_command() {
    let bench = Bench::start().await;
    let key = GrantKey::load_or_create(&bench.dir.path().join("keys/grant.key")).unwrap();
    let answer =
        v1::ExecSyncResponse { stdout: vec![b'o'; 10_000], stderr: vec![b'e'; 10_000], exit_code: 3 };
    bench.script.on(EXEC, [good(&answer), failing(4, "timeout 2s exceeded"), failing(14, "away")]);
    let path = "/quintlet.runtime.v1.ProbeExec/Exec";
    let command = vec!["cat".to_owned(), "/ok".to_owned()];
    let granted = pb::ProbeExecRequest {
        container_id: "c".into(),
        command: command.clone(),
        timeout_seconds: 2,
        grant: key.sign("c", &command, 2),
    };
    let tampered = [
        (pb::ProbeExecRequest { container_id: "d".into(), ..granted.clone() }, "7"),
        (pb::ProbeExecRequest { command: vec!["cat".into(), "/no".into()], ..granted.clone() }, "7"),
        (pb::ProbeExecRequest { command: vec!["cat/ok".into()], ..granted.clone() }, "7"),
        (pb::ProbeExecRequest { timeout_seconds: 3, ..granted.clone() }, "7"),
        (pb::ProbeExecRequest { grant: vec![], ..granted.clone() }, "7"),
        (pb::ProbeExecRequest { timeout_seconds: 0, ..granted.clone() }, "3"),
    ];
    for (request, code) in tampered {
        assert_eq!(
            bench.call(Socket::Probe, path, &[], reply::frame(&request)).await.code(),
            code,
            "{request:?}"
        );
    }
    assert!(bench.script.seen(EXEC).is_empty());
    let exec = async || {
        let got = bench.call(Socket::Probe, path, &[], reply::frame(&granted)).await;
        let reply: Option<pb::ProbeExecReply> =
            reply::unframe(&got.body).ok().and_then(|m| prost::Message::decode(m).ok());
        (got, reply)
    };
    let reply = exec().await.1.unwrap();
    assert_eq!((reply.exit_code, reply.output.len(), reply.timed_out), (3, 10_240, false));
    assert_eq!(reply.output[9_999..10_001], *b"oe");
    assert!(exec().await.1.unwrap().timed_out);
    assert_eq!(exec().await.0.code(), "14");
    let seen = bench.script.seen(EXEC);
    let sent = v1::ExecSyncRequest { container_id: "c".into(), cmd: command, timeout: 2 };
    assert_eq!(seen[0].body, reply::frame(&sent));
    let timeout = reply::grpc_timeout(&seen[0].headers).unwrap();
    assert!((Duration::from_secs(121)..=Duration::from_secs(122)).contains(&timeout), "{timeout:?}");
}

#[tokio::test]
async fn a_corrupt_frame_fails_only_its_call() {
    let bench = Bench::start().await;
    bench.script.on(START, [good(&v1::StartContainerResponse {})]);
    let corrupt: [&'static [u8]; 5] =
        [b"", b"\0\0", b"\0\xff\xff\xff\xffx", b"\x07\0\0\0\0", b"\0\0\0\0\x02\x0a\xff"];
    let caller = bench.caller(Socket::Sync);
    let call = async |body: Bytes| {
        let request =
            reply::request(START, headers(&[("te", "trailers"), EPOCH]), Frames::from_data(vec![body]));
        got(caller.send(request).await.unwrap()).await
    };
    for body in corrupt {
        let got = call(Bytes::from_static(body)).await;
        assert_eq!((got.code(), got.outcome()), ("3", "not-dispatched"), "{body:?}: {got:?}");
        assert_eq!(call(start("c")).await.outcome(), "ok", "the same connection still works after {body:?}");
    }
    for socket in Socket::ALL {
        let mut stream = tokio::net::UnixStream::connect(bench.path(socket)).await.unwrap();
        stream.write_all(&[0xff; 4096]).await.unwrap();
        let _ = stream.read_to_end(&mut Vec::new()).await;
    }
    assert_eq!(call(start("c")).await.outcome(), "ok");
    for row in policy::TABLE.iter().filter(|row| row.class != Class::Stream) {
        let path = format!("/{}/{}", row.service, row.method);
        let got = bench.call(Socket::Admin, &path, &[], Bytes::from_static(b"\0\0\0\0\x09x")).await;
        assert_eq!(got.outcome(), "not-dispatched", "{path}: {got:?}");
    }
}

#[tokio::test]
async fn a_call_during_which_the_runtime_may_end_is_not_sent_until_another_version_is_connected() {
    const STATS: [&str; 3] = ["PodSandboxStats", "ListPodSandboxStats", "StreamPodSandboxStats"];
    let path = |method: &str| format!("/runtime.v1.RuntimeService/{method}");
    let version = |version: &str| {
        let (name, version) = ("containerd".to_owned(), version.to_owned());
        good(&v1::VersionResponse { runtime_name: name, runtime_version: version, ..Default::default() })
    };
    let mut bench = Bench::with("containerd", "1.6.20~ds1", 64, Clock::system()).await;
    for method in STATS {
        bench.script.on(&path(method), [good(&v1::ListPodSandboxStatsResponse::default())]);
    }
    bench.script.on(&path("ListContainerStats"), [good(&v1::ListContainerStatsResponse::default())]);
    let sent =
        |bench: &Bench| -> usize { STATS.iter().map(|method| bench.script.seen(&path(method)).len()).sum() };
    for socket in [Socket::Read, Socket::NodeApi, Socket::Admin] {
        for method in STATS {
            let got = bench.call(socket, &path(method), &[], empty()).await;
            let expected = ("12", "not-dispatched");
            assert_eq!((got.code(), got.outcome()), expected, "{} {method}", socket.name());
            assert!(got.meta("grpc-message").contains("1.6.20"), "{}", got.meta("grpc-message"));
        }
        let got = bench.call(socket, &path("ListContainerStats"), &[], empty()).await;
        assert_eq!(got.code(), "0", "statistics of containers are harmless");
    }
    assert_eq!(sent(&bench), 0);
    for (next, code) in [("1.6.22", "0"), ("1.6.21", "12"), ("v2.1.9", "0")] {
        let before = sent(&bench);
        bench.down();
        bench.script.on(&path("Version"), [version(next)]);
        bench.up();
        eventually("an answer of the other version", async || {
            let got = bench.call(Socket::NodeApi, &path("PodSandboxStats"), &[], empty()).await;
            (got.code() == code).then_some(())
        })
        .await;
        assert_eq!(sent(&bench) > before, code == "0", "{next}");
    }
    // Without the version, nothing is sent either.
    bench.down();
    bench.script.on(&path("Version"), [failing(13, "no version")]);
    bench.up();
    let before = sent(&bench);
    eventually("the error of the runtime", async || {
        let got = bench.call(Socket::NodeApi, &path("PodSandboxStats"), &[], empty()).await;
        (got.code() == "14" && got.meta("grpc-message").contains("no%20version")).then_some(())
    })
    .await;
    assert_eq!(sent(&bench), before);
}
