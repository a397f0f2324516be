//! Redirects of the runtime's streaming server are neither followed nor forwarded (CVE-2020-8559).

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use node_api_access::limits::Limits;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use crate::common::{Api, head};

const OPEN: &[&str] = &["--anonymous-auth=true", "--authorization-mode=AlwaysAllow"];

const REDIRECTS: [&str; 7] = [
    "300 Multiple Choices",
    "301 Moved Permanently",
    "302 Found",
    "303 See Other",
    "305 Use Proxy",
    "307 Temporary Redirect",
    "308 Permanent Redirect",
];

/// Headers of the three upgrade protocols of clients.
const SPDY: &str =
    "connection: Upgrade\r\nupgrade: SPDY/3.1\r\nx-stream-protocol-version: v4.channel.k8s.io\r\n";
const CHANNELS: &str = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
    sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: v5.channel.k8s.io\r\n";
const TUNNEL: &str = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
    sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-protocol: SPDY/3.1+portforward.k8s.io\r\n";

/// Starts a server that counts connections and replies to each request with `answer`.
async fn server(answer: impl Fn(&str) -> String + Send + Sync + 'static) -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    quintlet_kit::task::spawn("server", async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let request = head(&mut stream).await;
            stream.write_all(answer(&request).as_bytes()).await.unwrap();
        }
    });
    (address, requests)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redirect_of_an_upgrade_is_neither_followed_nor_passed_on() {
    // The other server would switch protocols and respond to the client.
    let switched =
        "HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: SPDY/3.1\r\n\r\nelsewhere";
    let (elsewhere, reached) = server(|_| switched.to_owned()).await;
    for redirect in REDIRECTS {
        let (streaming, reached_streaming) = server(move |_| {
            format!(
                "HTTP/1.1 {redirect}\r\nlocation: http://{elsewhere}/exec/stolen\r\ncontent-length: 4\r\n\r\nbody"
            )
        })
        .await;
        let (api, _runtime) = Api::with_streaming_server(Limits::default(), OPEN, streaming).await;
        let requests = [
            ("POST", "/exec/default/web/main?output=1&command=cat", SPDY),
            ("POST", "/attach/default/web/main?output=1", SPDY),
            ("POST", "/portForward/default/web", SPDY),
            ("GET", "/exec/default/web/main?output=1&command=cat", CHANNELS),
            ("GET", "/portForward/default/web?port=80", TUNNEL),
        ];
        for (count, (method, path, headers)) in requests.into_iter().enumerate() {
            let mut client = api.tls(None).await;
            let request =
                format!("{method} {path} HTTP/1.1\r\nhost: n\r\n{headers}content-length: 0\r\n\r\n");
            client.write_all(request.as_bytes()).await.unwrap();
            let answer = head(&mut client).await;
            let context = format!("{redirect}, {method} {path}: {answer}");
            assert!(answer.starts_with("HTTP/1.1 500 "), "{context}");
            assert!(!answer.to_ascii_lowercase().contains("location:"), "{context}");
            let length = answer.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            let mut body = vec![0; length.parse().unwrap()];
            client.read_exact(&mut body).await.unwrap();
            let body = String::from_utf8(body).unwrap();
            assert_eq!(
                body, "the runtime's streaming server redirects, which is not followed\n",
                "{context}"
            );
            assert_eq!(reached_streaming.load(Ordering::SeqCst), count + 1, "{context}");
            assert_eq!(reached.load(Ordering::SeqCst), 0, "{context}");
        }
    }
}
