//! Corrupt frames on every socket of the five services: the call fails, and the service continues.

use std::path::PathBuf;
use std::time::Duration;

use cri_proxy::reply::{self, Frames};
use cri_proxy::upstream::Upstream;
use http::HeaderMap;
use http_body_util::BodyExt as _;
use prost_types::FileDescriptorSet;
use quintlet_e2e::bins::SERVICES;
use quintlet_e2e::{Node, Options, pods};
use quintlet_kit::args::paths::CriSocket;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tonic::codegen::Bytes;

/// Each of these is not a complete gRPC message of any type here: empty, half a prefix, a length without
/// data, an undefined flag, an invalid protobuf, an invalid compressed message.
const CORRUPT: [&[u8]; 6] = [
    b"",
    b"\0\0",
    b"\0\xff\xff\xff\xffx",
    b"\x07\0\0\0\0",
    b"\0\0\0\0\x04\xff\xff\xff\xff",
    b"\x01\0\0\0\x02\x0a\x00",
];

/// Returns every method of our contracts and one of the CRI, with whether its request is a stream.
fn methods() -> Vec<(String, bool)> {
    let set: FileDescriptorSet = prost::Message::decode(quintlet_proto::FILE_DESCRIPTOR_SET).unwrap();
    let mut out = vec![("/runtime.v1.RuntimeService/RunPodSandbox".to_owned(), false)];
    for file in &set.file {
        for service in &file.service {
            let name = |m: &str| format!("/{}.{}/{m}", file.package(), service.name());
            out.extend(service.method.iter().map(|m| (name(m.name()), m.client_streaming())));
        }
    }
    assert!(out.len() > 20, "{out:?}");
    out
}

fn sockets(node: &Node) -> Vec<PathBuf> {
    let paths = node.paths();
    let kinds = [CriSocket::Admin, CriSocket::Sync, CriSocket::Read, CriSocket::NodeApi, CriSocket::Probe];
    let mut all: Vec<PathBuf> = kinds.into_iter().map(|kind| paths.cri(kind)).collect();
    all.extend([paths.pleg(), paths.probe("probe-0"), paths.status(), paths.podsync()]);
    all
}

/// Returns the gRPC status of the response; `None` if the stream was reset.
async fn status(caller: &Upstream, method: &str, body: &'static [u8]) -> Option<String> {
    let mut headers = HeaderMap::new();
    for (name, value) in
        [("content-type", "application/grpc"), ("te", "trailers"), ("quintlet-owner-epoch", "1")]
    {
        headers.insert(name, value.parse().unwrap());
    }
    let body = Frames::from_data(vec![Bytes::from_static(body)]);
    let response = caller.send(reply::request(method, headers, body)).await.ok()?;
    let (head, body) = response.into_parts();
    let trailers = body.collect().await.ok()?.trailers().cloned();
    let value = |map: &HeaderMap| map.get("grpc-status").map(|v| v.to_str().unwrap().to_owned());
    trailers.as_ref().and_then(value).or_else(|| value(&head.headers))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_frame_on_any_socket_fails_only_its_call() {
    let node = Node::start(Options::with_api("frames")).await;
    node.api().create_pod(pods::bound(pods::probed("web")));
    node.wait_ready("web").await;
    let before = node.steady(&["web"]).await;
    let recorder = node.record().await;
    let mut calls = 0;
    for socket in sockets(&node) {
        let caller = Upstream::new(socket.clone());
        for (method, streams) in methods() {
            // An empty request stream is valid.
            for body in CORRUPT.into_iter().filter(|body| !streams || !body.is_empty()) {
                let place = format!("{} {method} {body:?}", socket.display());
                let call = tokio::time::timeout(Duration::from_secs(20), status(&caller, &method, body));
                let got = call.await.unwrap_or_else(|_| panic!("no answer: {place}"));
                assert_ne!(got.as_deref(), Some("0"), "{place}");
                calls += 1;
            }
        }
        // The same connection still serves.
        let health = status(&caller, "/grpc.health.v1.Health/Check", b"\0\0\0\0\0").await;
        assert_eq!(health.as_deref(), Some("0"), "{}", socket.display());
        // Bytes that are not HTTP/2.
        let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
        // The server may close the connection at any byte.
        let _cut = stream.write_all(&[0xff; 4096]).await;
        let _cut = stream.read_to_end(&mut Vec::new()).await;
    }
    println!("{calls} corrupt calls");
    for name in SERVICES {
        node.wait_serving(name, Duration::from_secs(5)).await;
        assert_eq!(node.service(name).process().starts, 1, "{name} fell over");
    }
    // All five services still work.
    node.api().create_pod(pods::bound(pods::probed("later")));
    node.wait_ready("later").await;
    recorder.assert_steady("while corrupt frames came", &before);
    node.down().await;
}
