//! Proxies requests to a node: `pods/{log,exec,attach,portforward}` and `nodes/proxy`, with upgrades.
//!
//! Like the real server, it uses the address and port in the Node's status, over TLS without a check of the
//! node's certificate, as the user `kube-apiserver` (with a token instead of a certificate). The client's
//! credentials are not forwarded.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use crate::error::ApiError;
use crate::server::Server;

/// Token of this server for requests to nodes.
pub(crate) const NODE_TOKEN: &str = "testapi-to-node";
/// User of that token.
pub(crate) const NODE_USER: &str = "kube-apiserver-kubelet-client";

/// Returns the node and path that a request is proxied to; `None` if this server handles the request.
pub(crate) fn target(server: &Server, path: &str, query: Option<&str>) -> Option<Result<Target, ApiError>> {
    let parts: Vec<&str> = path.split('/').skip(1).collect();
    let with_query = |path: String, query: Option<&str>| match query {
        Some(query) if !query.is_empty() => format!("{path}?{query}"),
        _ => path,
    };
    match parts.as_slice() {
        ["api", "v1", "nodes", node, "proxy", rest @ ..] => {
            let name = node.split(':').next().unwrap_or(node);
            Some(locate(server, name).map(|(host, port)| Target {
                host,
                port,
                path: with_query(format!("/{}", rest.join("/")), query),
                is_log: false,
            }))
        }
        ["api", "v1", "namespaces", ns, "pods", pod, what @ ("log" | "exec" | "attach" | "portforward")] => {
            Some(of_pod(server, ns, pod, what, query))
        }
        _ => None,
    }
}

/// Destination of a proxied request.
#[derive(Debug)]
pub(crate) struct Target {
    host: String,
    port: u16,
    path: String,
    /// Whether the request is for a log: its errors become a `Status`.
    is_log: bool,
}

/// Bytes of a node's error that are forwarded.
const ERROR_LIMIT: usize = 50_000;

fn of_pod(server: &Server, ns: &str, pod: &str, what: &str, query: Option<&str>) -> Result<Target, ApiError> {
    let pods = crate::resources::Resource::by_plural("pods")
        .ok_or_else(|| ApiError::new(404, "NotFound", "no pods"))?;
    let object = server.store.get(pods, ns, pod)?;
    let node = object["spec"]["nodeName"].as_str().unwrap_or_default();
    if node.is_empty() {
        return Err(ApiError::bad_request(format!("pod {pod} does not have a host assigned")));
    }
    let pairs: Vec<(&str, &str)> = query
        .unwrap_or_default()
        .split('&')
        .filter(|p| !p.is_empty())
        .map(|p| p.split_once('=').unwrap_or((p, "")))
        .collect();
    let names: Vec<&str> = object["spec"]["containers"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|c| c["name"].as_str())
        .collect();
    let container_name =
        pairs.iter().find(|(k, _)| *k == "container").map(|(_, v)| *v).filter(|v| !v.is_empty());
    let container = match (container_name, names.as_slice()) {
        (Some(name), _) => name,
        (None, [name]) => name,
        (None, _) => {
            let message =
                format!("a container name must be specified for pod {pod}, choose one of: {names:?}");
            return Err(ApiError::bad_request(message));
        }
    };
    // The node has other names for the stream parameters than the API.
    let flag =
        |name: &str| pairs.iter().any(|(k, v)| *k == name && (*v == "true" || *v == "1" || v.is_empty()));
    let mut sent = Vec::new();
    let (path, kept): (_, &[&str]) = match what {
        "log" => (
            format!("/containerLogs/{ns}/{pod}/{container}"),
            &[
                "follow",
                "previous",
                "timestamps",
                "sinceSeconds",
                "sinceTime",
                "tailLines",
                "limitBytes",
                "stream",
            ],
        ),
        "portforward" => (format!("/portForward/{ns}/{pod}"), &["port", "ports"]),
        what => {
            for (option, parameter) in
                [("stdin", "input"), ("stdout", "output"), ("stderr", "error"), ("tty", "tty")]
            {
                if flag(option) {
                    sent.push(format!("{parameter}=1"));
                }
            }
            (format!("/{what}/{ns}/{pod}/{container}"), &["command"])
        }
    };
    sent.extend(pairs.iter().filter(|(k, _)| kept.contains(k)).map(|(k, v)| format!("{k}={v}")));
    let (host, port) = locate(server, node)?;
    let path = if sent.is_empty() { path } else { format!("{path}?{}", sent.join("&")) };
    Ok(Target { host, port, path, is_log: what == "log" })
}

fn locate(server: &Server, name: &str) -> Result<(String, u16), ApiError> {
    let nodes = crate::resources::Resource::by_plural("nodes")
        .ok_or_else(|| ApiError::new(404, "NotFound", "no nodes"))?;
    let node = server.store.get(nodes, "", name)?;
    let addresses: Vec<&Value> = node["status"]["addresses"].as_array().into_iter().flatten().collect();
    // Host names of test nodes do not resolve.
    let host = addresses.iter().find(|a| a["type"] == "InternalIP").and_then(|a| a["address"].as_str());
    let port = node["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].as_u64().unwrap_or(0);
    match (host, u16::try_from(port)) {
        (Some(host), Ok(port)) if port != 0 => Ok((host.to_owned(), port)),
        _ => Err(ApiError::new(
            500,
            "InternalError",
            format!("node {name} has no address or no kubelet port in its status"),
        )),
    }
}

/// Forwards a request, and returns the response.
pub(crate) async fn pass_on(target: Target, request: Request) -> Response {
    match send(&target, request).await {
        Ok(response) if target.is_log && response.status().as_u16() >= 400 => as_status(response).await,
        Ok(response) => response,
        Err(error) => {
            let message = format!("error dialing backend: {}:{}: {error}", target.host, target.port);
            ApiError::new(500, "InternalError", message).into_response()
        }
    }
}

/// Converts a node's response to a log request like the real server.
async fn as_status(response: Response) -> Response {
    let code = response.status().as_u16();
    let body = axum::body::to_bytes(response.into_body(), ERROR_LIMIT).await.unwrap_or_default();
    let text = String::from_utf8_lossy(&body).trim().to_owned();
    match code {
        400 => ApiError::bad_request(text),
        500 => ApiError::new(500, "InternalError", format!("Internal error occurred: {text}")),
        404 => ApiError::new(
            404,
            "NotFound",
            format!("the server could not find the requested resource ( {text})"),
        ),
        _ => ApiError::new(code, "", text),
    }
    .into_response()
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

async fn send(target: &Target, mut request: Request) -> Result<Response, BoxError> {
    let connecting = TcpStream::connect((target.host.as_str(), target.port));
    let stream = tokio::time::timeout(Duration::from_secs(10), connecting).await??;
    stream.set_nodelay(true)?;
    let name = ServerName::try_from(target.host.clone())?;
    let connector = TlsConnector::from(Arc::new(quintlet_kit::tls::unverified()));
    let stream = connector.connect(name, stream).await?;
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
    #[expect(clippy::disallowed_methods, reason = "a test server has no services' tasks")]
    tokio::spawn(connection.with_upgrades());
    let upgrade = request.headers().contains_key(header::UPGRADE);
    let client = upgrade.then(|| hyper::upgrade::on(&mut request));
    let (parts, body) = request.into_parts();
    let mut headers = parts.headers;
    clean(&mut headers, upgrade);
    headers.insert(header::HOST, HeaderValue::from_str(&format!("{}:{}", target.host, target.port))?);
    headers.insert(header::AUTHORIZATION, HeaderValue::from_str(&format!("Bearer {NODE_TOKEN}"))?);
    let mut sent = http::Request::new(body);
    *sent.method_mut() = parts.method;
    *sent.uri_mut() = target.path.parse::<Uri>()?;
    *sent.headers_mut() = headers;
    let mut response = sender.send_request(sent).await?;
    if response.status() == StatusCode::SWITCHING_PROTOCOLS
        && let Some(client) = client
    {
        let node = hyper::upgrade::on(&mut response);
        #[expect(clippy::disallowed_methods, reason = "a test server has no services' tasks")]
        tokio::spawn(async move {
            if let (Ok(client), Ok(node)) = (client.await, node.await) {
                // A broken connection is handled by the client.
                let _ =
                    tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(node)).await;
            }
        });
        return Ok(response.map(|_| Body::empty()));
    }
    Ok(response.map(Body::new))
}

/// Removes hop-by-hop headers, except those of an upgrade.
fn clean(headers: &mut HeaderMap, upgrade: bool) {
    headers.remove(header::AUTHORIZATION);
    for name in [header::TE, header::TRAILER, header::TRANSFER_ENCODING] {
        headers.remove(name);
    }
    if !upgrade {
        headers.remove(header::CONNECTION);
    }
}
