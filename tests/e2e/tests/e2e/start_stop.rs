//! Starts and stops that depend on the runtime: mount propagation, hooks over TLS, dead instances.

use std::sync::Arc;

use quintlet_e2e::{LONG, Node, Options, Seen, pods, until};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::{ServerConfig, crypto, pki_types};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mount_in_a_container_propagates_to_the_node_and_to_another_container() {
    let node = Node::start(Options::standalone("propagation")).await;
    let mut pod = pods::script(
        "travels",
        "mkdir -p /v/m && mount -t tmpfs none /v/m && echo hello > /v/m/file && touch /v/done
         trap 'umount /v/m; exit 0' TERM; sleep 100000 & wait",
    );
    let mut reader = pod["spec"]["containers"][0].clone();
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    let writer = &mut pod["spec"]["containers"][0];
    writer["securityContext"] = json!({"privileged": true});
    writer["volumeMounts"] = json!([{"name": "v", "mountPath": "/v", "mountPropagation": "Bidirectional"}]);
    reader["name"] = json!("reader");
    reader["command"] = json!([
        "sh",
        "-c",
        "until [ -e /v/done ]; do sleep 0.1; done; cat /v/m/file > /v/seen
         trap 'exit 0' TERM; sleep 100000 & wait"
    ]);
    reader["volumeMounts"] = json!([{"name": "v", "mountPath": "/v", "mountPropagation": "HostToContainer"}]);
    let mut private = reader.clone();
    private["name"] = json!("private");
    private["command"] = json!([
        "sh",
        "-c",
        "until [ -e /v/done ]; do sleep 0.1; done; ls -A /v/m > /v/private
         trap 'exit 0' TERM; sleep 100000 & wait"
    ]);
    private["volumeMounts"] = json!([{"name": "v", "mountPath": "/v"}]);
    let containers = pod["spec"]["containers"].as_array_mut().unwrap();
    // The observing containers start before the mount is created, so only propagation can show it.
    containers.insert(0, private);
    containers.insert(0, reader);
    node.pod_manifest(&pod);
    let seen = node.wait_ready("travels").await;
    let file = |name: &str| node.empty_dir_file(seen.uid(), "v", name);
    until("the neighbour's file", LONG, async || {
        let (got, other) = (file("seen"), file("private"));
        if got == "hello\n" && other.is_empty() { Ok(()) } else { Err((got, other)) }
    })
    .await;
    assert_eq!(file("m/file"), "hello\n", "the node sees it too");
    assert_eq!(file("private"), "", "who did not ask for it does not");
    let uid = seen.uid().to_owned();
    node.remove_manifest("travels.yaml");
    node.wait_gone(&uid).await;
    node.down().await;
}

/// Starts a TLS server that replies to every request with an error, and returns the requests.
async fn tls_server() -> (u16, tokio::sync::mpsc::Receiver<String>) {
    let made = rcgen::generate_simple_self_signed(vec!["elsewhere.test".to_owned()]).unwrap();
    let key = pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (tx, rx) = tokio::sync::mpsc::channel(16);
    tokio::spawn(async move {
        while let Ok((tcp, _)) = listener.accept().await {
            let Ok(mut tls) = acceptor.accept(tcp).await else { continue };
            let mut buffer = vec![0; 4096];
            let n = tls.read(&mut buffer).await.unwrap_or(0);
            let _ = tx.send(String::from_utf8_lossy(&buffer[..n]).into_owned()).await;
            let _ = tls.write_all(b"HTTP/1.1 500 X\r\ncontent-length: 0\r\nconnection: close\r\n\r\n").await;
            let _ = tls.shutdown().await;
        }
    });
    (port, rx)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn https_hooks_run_and_dead_instances_of_a_crashing_container_are_removed() {
    let node = Node::start(Options::standalone("hooks")).await;
    let (port, mut requests) = tls_server().await;
    let get =
        |path: &str| json!({"httpGet": {"host": "127.0.0.1", "port": port, "scheme": "HTTPS", "path": path}});
    let mut pod = pods::sleeper("hooked");
    pod["spec"]["containers"][0]["lifecycle"] =
        json!({"postStart": get("/started"), "preStop": get("/stops")});
    node.pod_manifest(&pod);
    let hooked = node.wait_ready("hooked").await;
    assert!(requests.recv().await.unwrap().starts_with("GET /started HTTP/1.1"));
    node.pod_manifest(&pods::script("crasher", "exit 3"));
    let restarts = |p: &Seen| p.pod["status"]["containerStatuses"][0]["restartCount"].as_i64();
    let crasher = node.wait_pod("crasher", "restarts", LONG, |p| restarts(p) >= Some(2)).await;
    until("two instances at most", LONG, async || {
        let attempts = node.listed().await.attempts(crasher.uid(), "main");
        if attempts.len() <= 2 { Ok(()) } else { Err(attempts) }
    })
    .await;
    let uid = hooked.uid().to_owned();
    node.remove_manifest("hooked.yaml");
    node.wait_gone(&uid).await;
    assert!(requests.recv().await.unwrap().starts_with("GET /stops HTTP/1.1"));
    node.down().await;
}
