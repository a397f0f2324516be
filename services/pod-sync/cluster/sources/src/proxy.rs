//! HTTP proxies of the environment, for the manifest URL (`golang.org/x/net/http/httpproxy`).
//!
//! `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY` apply as in a kubelet, in upper case or lower case. A proxy
//! itself is reached by plain HTTP; another scheme is an error of each request.

use std::io;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::BoxFuture;
use http::uri::Scheme;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection, HttpConnector};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tower::Service;

/// Bytes of the response to CONNECT, at most.
const MAX_RESPONSE: usize = 8 << 10;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A server that forwards requests or opens tunnels.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Proxy {
    /// The proxy's host and port, as a URL.
    at: Uri,
    /// Value of `Proxy-Authorization`, if the URL has a user.
    pub(crate) authorization: Option<HeaderValue>,
}

impl std::fmt::Debug for Proxy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Proxy").field("at", &self.at).finish_non_exhaustive()
    }
}

/// Proxies by scheme, and the hosts that are reached directly.
#[derive(Debug, Clone, Default)]
pub struct Proxies {
    http: Option<Result<Proxy, String>>,
    https: Option<Result<Proxy, String>>,
    direct: Vec<Direct>,
}

/// An entry of `NO_PROXY`.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Direct {
    All,
    /// Network and length of its prefix.
    Network(IpAddr, u32),
    Address(IpAddr, Option<u16>),
    /// The end of a name, from a dot on. The name itself belongs to it if `whole` is set.
    Domain {
        end: String,
        whole: bool,
        port: Option<u16>,
    },
}

impl Proxies {
    /// Reads the environment of this process.
    #[must_use]
    pub fn from_env() -> Self {
        Self::of(|name| std::env::var(name).ok())
    }

    fn of(variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let any = |name: &str| set(name).or_else(|| set(&name.to_lowercase()));
        let proxy = |name: &str| any(name).map(|url| proxy(&url).map_err(|why| format!("{name}: {why}")));
        Self {
            http: proxy("HTTP_PROXY"),
            https: proxy("HTTPS_PROXY"),
            direct: any("NO_PROXY").iter().flat_map(|list| list.split(',')).filter_map(direct).collect(),
        }
    }

    /// Returns the proxy for a URL; `None` if its host is reached directly.
    ///
    /// # Errors
    /// The URL of the proxy is not valid.
    pub(crate) fn for_url(&self, url: &Uri) -> Result<Option<&Proxy>, String> {
        let is_https = url.scheme() == Some(&Scheme::HTTPS);
        let Some(proxy) = (if is_https { &self.https } else { &self.http }) else { return Ok(None) };
        let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let host = host.trim_end_matches('.').to_lowercase();
        let port = url.port_u16().unwrap_or(if is_https { 443 } else { 80 });
        if self.is_direct(&host, port) {
            return Ok(None);
        }
        proxy.as_ref().map(Some).map_err(Clone::clone)
    }

    // `useProxy`
    fn is_direct(&self, host: &str, port: u16) -> bool {
        let address: Option<IpAddr> = host.parse().ok();
        if host == "localhost" || address.is_some_and(|ip| ip.is_loopback()) {
            return true;
        }
        let fits = |wanted: &Option<u16>| wanted.is_none_or(|wanted| wanted == port);
        self.direct.iter().any(|entry| match entry {
            Direct::All => true,
            Direct::Network(network, length) => address.is_some_and(|ip| contains(*network, *length, ip)),
            Direct::Address(ip, port) => address == Some(*ip) && fits(port),
            Direct::Domain { end, whole, port } => {
                (host.ends_with(end.as_str()) || (*whole && host == &end[1..])) && fits(port)
            }
        })
    }
}

fn contains(network: IpAddr, length: u32, address: IpAddr) -> bool {
    let bits = |ip: IpAddr| match ip {
        IpAddr::V4(ip) => (u128::from(ip.to_bits()) << 96, 4),
        IpAddr::V6(ip) => (ip.to_bits(), 6),
    };
    let ((network, family), (address, other)) = (bits(network), bits(address));
    let apart = network ^ address;
    family == other && apart.leading_zeros() >= length
}

fn direct(entry: &str) -> Option<Direct> {
    let entry = entry.trim().to_lowercase();
    if entry.is_empty() {
        return None;
    }
    if entry == "*" {
        return Some(Direct::All);
    }
    if let Some((network, length)) = entry.split_once('/')
        && let (Ok(network), Ok(length)) = (network.parse(), length.parse())
    {
        return Some(Direct::Network(network, length));
    }
    if let Ok(ip) = entry.parse() {
        return Some(Direct::Address(ip, None));
    }
    let (host, port) = match entry.rsplit_once(':') {
        Some((host, port)) => (host.trim_start_matches('[').trim_end_matches(']'), port.parse().ok()),
        None => (entry.as_str(), None),
    };
    if let Ok(ip) = host.parse() {
        return Some(Direct::Address(ip, port));
    }
    let host = host.strip_prefix("*.").map_or_else(|| host.to_owned(), |rest| format!(".{rest}"));
    let whole = !host.starts_with('.');
    let end = if whole { format!(".{host}") } else { host };
    (end.len() > 1).then_some(Direct::Domain { end, whole, port })
}

// A text without a scheme is the host of an HTTP proxy. The errors do not quote the URL, which may have a
// password.
fn proxy(text: &str) -> Result<Proxy, String> {
    let text = if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
    let url: Uri = text.parse().map_err(|_| "not a valid URL".to_owned())?;
    if url.scheme() != Some(&Scheme::HTTP) {
        let scheme = url.scheme_str().unwrap_or_default();
        return Err(format!("a proxy with the scheme {scheme:?} is not supported, want http"));
    }
    let authority = url.authority().ok_or("no host")?;
    let user = authority.as_str().rsplit_once('@').map(|(user, _)| user);
    let authorization = user.map(|user| {
        let plain: Vec<u8> = percent_encoding::percent_decode_str(user).collect();
        let plain = if user.contains(':') { plain } else { [&plain[..], b":"].concat() };
        HeaderValue::from_str(&format!("Basic {}", STANDARD.encode(plain)))
    });
    let mut authorization = authorization.transpose().map_err(|_| "not a valid user".to_owned())?;
    if let Some(value) = &mut authorization {
        value.set_sensitive(true);
    }
    let port = url.port_u16().unwrap_or(80);
    let at =
        format!("http://{}:{port}/", authority.host()).parse().map_err(|_| "not a valid host".to_owned())?;
    Ok(Proxy { at, authorization })
}

/// Connects to hosts, through their proxies where they have one. A proxy forwards requests with the scheme
/// `http`, and opens a tunnel for `https`.
#[derive(Debug, Clone)]
pub(crate) struct ProxyConnector {
    http: HttpConnector,
    proxies: Arc<Proxies>,
}

impl ProxyConnector {
    pub(crate) fn new(proxies: Arc<Proxies>) -> Self {
        let mut http = HttpConnector::new();
        http.enforce_http(false);
        Self { http, proxies }
    }
}

impl Service<Uri> for ProxyConnector {
    type Response = ProxyStream;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<ProxyStream, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.http.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, url: Uri) -> Self::Future {
        let mut http = self.http.clone();
        let proxy = self.proxies.for_url(&url).map(Option::<&Proxy>::cloned);
        Box::pin(async move {
            let Some(proxy) = proxy? else {
                return Ok(ProxyStream { inner: http.call(url).await?, forwards: false });
            };
            let inner = http.call(proxy.at.clone()).await?;
            if url.scheme() != Some(&Scheme::HTTPS) {
                return Ok(ProxyStream { inner, forwards: true });
            }
            let mut stream = inner.into_inner();
            open_tunnel(&mut stream, &url, &proxy).await?;
            Ok(ProxyStream { inner: TokioIo::new(stream), forwards: false })
        })
    }
}

async fn open_tunnel(stream: &mut TcpStream, url: &Uri, proxy: &Proxy) -> io::Result<()> {
    let (host, port) = (url.host().unwrap_or_default(), url.port_u16().unwrap_or(443));
    let mut request = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n").into_bytes();
    if let Some(value) = &proxy.authorization {
        request.extend([b"Proxy-Authorization: ", value.as_bytes(), b"\r\n"].concat());
    }
    request.extend(b"\r\n");
    stream.write_all(&request).await?;
    let mut response = Vec::new();
    // The server of a tunnel waits for the client, so nothing follows the response.
    while !response.ends_with(b"\r\n\r\n") {
        if response.len() >= MAX_RESPONSE {
            return Err(io::Error::other("the proxy's response to CONNECT is too long"));
        }
        response.push(stream.read_u8().await?);
    }
    let line = response.split(|byte| *byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    if line.split(' ').nth(1) == Some("200") {
        Ok(())
    } else {
        Err(io::Error::other(format!("the proxy refused CONNECT: {line}")))
    }
}

/// A connection to a host or to its proxy.
#[derive(Debug)]
pub(crate) struct ProxyStream {
    inner: TokioIo<TcpStream>,
    /// The peer is a proxy, which needs the whole URL of a request.
    forwards: bool,
}

impl Connection for ProxyStream {
    fn connected(&self) -> Connected {
        self.inner.connected().proxy(self.forwards)
    }
}

impl Read for ProxyStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: ReadBufCursor<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buffer)
    }
}

impl Write for ProxyStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn proxies(variables: &[(&str, &str)]) -> Proxies {
        let find =
            |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned());
        Proxies::of(find)
    }

    #[test]
    fn a_url_has_the_proxy_of_its_scheme_unless_its_host_is_excepted() {
        let both = [("HTTP_PROXY", "http://p:1"), ("https_proxy", "p:2")];
        for (no_proxy, url, want) in [
            ("", "http://a.example/x", Some("http://p:1/")),
            ("", "https://a.example/x", Some("http://p:2/")),
            ("", "http://localhost/x", None),
            ("", "http://127.1.2.3/x", None),
            ("", "http://[::1]:80/x", None),
            ("*", "http://a.example/x", None),
            ("a.example", "http://a.example/x", None),
            ("a.example", "http://A.Example./x", None),
            ("a.example", "http://b.a.example/x", None),
            ("a.example", "http://ba.example/x", Some("http://p:1/")),
            (".a.example", "http://a.example/x", Some("http://p:1/")),
            ("*.a.example", "http://b.a.example/x", None),
            ("x, a.example:8080", "http://a.example:8080/x", None),
            ("a.example:8080", "http://a.example/x", Some("http://p:1/")),
            ("a.example:443", "https://a.example/x", None),
            ("192.0.2.0/24", "http://192.0.2.9/x", None),
            ("192.0.2.0/24", "http://192.0.3.9/x", Some("http://p:1/")),
            ("192.0.2.0/24", "http://[2001:db8::1]/x", Some("http://p:1/")),
            ("2001:db8::/32", "http://[2001:db8::1]/x", None),
            ("2001:db8::1", "http://[2001:db8::1]/x", None),
            ("0.0.0.0/0", "http://192.0.2.9/x", None),
            ("192.0.2.9:81", "http://192.0.2.9/x", Some("http://p:1/")),
        ] {
            let all = proxies(&[&both[..], &[("NO_PROXY", no_proxy)]].concat());
            let got = all.for_url(&url.parse().unwrap()).unwrap().map(|proxy| proxy.at.to_string());
            assert_eq!(got.as_deref(), want, "{url} with {no_proxy:?}");
        }
        assert_eq!(proxies(&[]).for_url(&"http://a.example/".parse().unwrap()), Ok(None));
    }

    #[test]
    fn a_proxy_has_a_user_a_port_or_an_error_that_does_not_quote_it() {
        let parsed = |text: &str| {
            let all = proxies(&[("http_proxy", text)]);
            let found = all.for_url(&"http://a.example/".parse().unwrap()).map(Option::<&Proxy>::cloned);
            found.map(|proxy| {
                let proxy = proxy.unwrap();
                let user = proxy.authorization.map(|value| value.to_str().unwrap().to_owned());
                (proxy.at.to_string(), user.unwrap_or_default())
            })
        };
        let row = |at: &str, user: &str| Ok((at.to_owned(), user.to_owned()));
        assert_eq!(parsed("p.example"), row("http://p.example:80/", ""));
        assert_eq!(parsed("http://u:p%40ss@p:3128"), row("http://p:3128/", "Basic dTpwQHNz"));
        assert_eq!(parsed("http://u@[2001:db8::1]:3128/"), row("http://[2001:db8::1]:3128/", "Basic dTo="));
        for bad in ["socks5://hunter2@p", "https://hunter2@p", "http://hunter2 @p"] {
            let error = parsed(bad).unwrap_err();
            assert!(error.starts_with("HTTP_PROXY: ") && !error.contains("hunter2"), "{error}");
        }
    }
}
