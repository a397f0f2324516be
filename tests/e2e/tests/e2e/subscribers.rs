//! Programs that are not part of Quintlet see an exit: the examples of `examples/subscribe` at the socket of
//! pleg-service, and a client over TCP at node-api.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;

use hyper_util::rt::TokioIo;
use quintlet_e2e::{LONG, NODE_API_UID, Node, Options, bins, pods, ports, until};
use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::pods_client::PodsClient;
use quintlet_proto::subscribe::v1::probes_client::ProbesClient;
use quintlet_proto::subscribe::v1::{
    WatchContainersRequest, WatchPodsRequest, WatchProbesRequest, watch_containers_event, watch_pods_event,
    watch_probes_event,
};
use quintlet_testkit::certificates::{Authority, ExtendedKeyUsagePurpose};
use serde_json::json;
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::ClientConfig;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint};

/// Writes certificates of a server and their CA, and returns TLS of the client `watcher`.
fn certificates(dir: &Path) -> ClientConfig {
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    let ca = Authority::new("ca of subscribers");
    let server = ca.server("node");
    for (file, text) in [("ca.crt", ca.pem()), ("tls.crt", &*server.pem()), ("tls.key", &*server.key_pem())] {
        std::fs::write(dir.join(file), text).unwrap();
    }
    let client = ca.client("watcher", "g", ExtendedKeyUsagePurpose::ClientAuth);
    let mut config = ClientConfig::builder_with_provider(Arc::new(quintlet_kit::crypto::provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(quintlet_kit::tls::unverified_certificate())
        .with_client_auth_cert(vec![client.der()], client.key_der())
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    config
}

async fn connect(port: u16, config: ClientConfig) -> Channel {
    let tls = TlsConnector::from(Arc::new(config));
    let connector = tower::service_fn(move |_| {
        let tls = tls.clone();
        async move {
            let stream = TcpStream::connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).await?;
            let name = ServerName::try_from("node").expect("a valid name");
            Ok::<_, std::io::Error>(TokioIo::new(tls.connect(name, stream).await?))
        }
    });
    Endpoint::from_static("http://node").connect_with_connector(connector).await.unwrap()
}

/// Returns a node with a port for the subscriber `watcher`.
async fn start(certificates: &Path, port: u16) -> Node {
    let listen = format!("--subscriber-listen=0.0.0.0:{port}");
    let file = |flag: &str, name: &str| format!("--subscriber-{flag}={}", certificates.join(name).display());
    let mut extra = Vec::new();
    for service in ["pleg-service", "probe-service", "pod-sync"] {
        extra
            .extend([(service, listen.clone()), (service, format!("--subscriber-relay-uid={NODE_API_UID}"))]);
    }
    let own = [
        listen,
        file("cert-file", "tls.crt"),
        file("key-file", "tls.key"),
        file("client-ca-file", "ca.crt"),
        "--subscriber-name=watcher".to_owned(),
    ];
    extra.extend(own.map(|flag| ("node-api", flag)));
    Node::start(Options { extra, node_api: true, ..Options::with_api("subscribers") }).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_examples_and_clients_over_tcp_see_an_exit() {
    let dir = tempfile::tempdir().unwrap();
    let [port, metrics_port] = ports::free();
    let config = certificates(dir.path());
    let node = start(dir.path(), port).await;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let socket = node.paths().pleg_subscribers();

    let python_path = std::env::join_paths([bins::grpcio(), root.join("proto")]).unwrap();
    let mut python = tokio::process::Command::new("python3");
    python.arg(root.join("examples/subscribe/exits.py")).args(["--listen", &metrics_port.to_string()]);
    python.arg("--socket").arg(&socket).env("PYTHONPATH", python_path).kill_on_drop(true);
    let _python = python.spawn().unwrap();
    let mut rust = tokio::process::Command::new(bins::example("exits"));
    let mut rust = rust.arg(&socket).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(rust.stdout.take().unwrap()).lines();

    let client = connect(port, config).await;
    let containers = ContainersClient::new(client.clone()).watch(WatchContainersRequest::default()).await;
    let mut containers = containers.unwrap().into_inner();
    let pods = PodsClient::new(client.clone()).watch(WatchPodsRequest::default()).await;
    let mut pods = pods.unwrap().into_inner();
    let mut probes =
        ProbesClient::new(client).watch(WatchProbesRequest::default()).await.unwrap().into_inner();
    let first = probes.message().await.unwrap().unwrap();
    assert!(matches!(first.event, Some(watch_probes_event::Event::Hello(_))), "{first:?}");
    let streams = "quintlet_subscribers{stream=\"containers\"}";
    until("three subscribers", LONG, async || match node.counter("pleg-service", streams).await {
        3 => Ok(()),
        other => Err(other),
    })
    .await;

    let scratch = node.scratch();
    let ends = pods::script("ends", "until [ -e /go/now ]; do sleep 0.1; done; exit 3");
    let mut pod = pods::with_dir(ends, &scratch, "/go");
    pod["spec"]["restartPolicy"] = json!("Never");
    node.pod_manifest(&pod);
    node.wait_pod("ends", "it runs", LONG, |pod| {
        pod.containers().values().any(|container| container.state == "running")
    })
    .await;
    std::fs::write(scratch.join("now"), "").unwrap();

    let seen = async {
        loop {
            let event = containers.message().await.unwrap().unwrap().event;
            let Some(watch_containers_event::Event::Pod(pod)) = event else { continue };
            if let Some(exit) = pod.containers.iter().find(|c| c.finished_unix_ns != 0) {
                return (exit.name.clone(), exit.exit_code, exit.reason.clone());
            }
        }
    };
    let seen = tokio::time::timeout(LONG, seen).await.expect("an exit over TCP");
    assert_eq!(seen, ("main".to_owned(), 3, "Error".to_owned()));
    let failed = async {
        loop {
            let event = pods.message().await.unwrap().unwrap().event;
            if matches!(event, Some(watch_pods_event::Event::Pod(pod)) if pod.phase == "Failed") {
                return;
            }
        }
    };
    tokio::time::timeout(LONG, failed).await.expect("the failed pod over TCP");
    let line = tokio::time::timeout(LONG, lines.next_line()).await.expect("a line of the Rust example");
    // A static pod has the name of the node in its name.
    let line = line.unwrap().unwrap();
    assert!(line.starts_with("default/ends-") && line.ends_with(" main: 3 Error"), "{line}");
    until("the count of the Python example", LONG, async || {
        let page = quintlet_e2e::page("127.0.0.1", metrics_port, "/metrics").await;
        let page = page.map_err(|error| error.to_string())?;
        let counted = page.lines().any(|line| {
            line.starts_with("container_exits_total{namespace=\"default\",pod=\"ends-")
                && line.ends_with("container=\"main\",reason=\"Error\",exit_code=\"3\"} 1")
        });
        if counted { Ok(()) } else { Err(page) }
    })
    .await;
    rust.kill().await.unwrap();
    node.down().await;
}
