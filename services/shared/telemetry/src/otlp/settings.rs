//! Where spans go and how, from the flag and the standard environment variables of OTLP exporters.

use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};

/// Default time limit of one export with its retries. Only the exporter's thread waits for an unreachable collector.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Path of traces below a base endpoint of OTLP over HTTP.
const TRACES_PATH: &str = "/v1/traces";

/// The flag, as errors name it.
const FLAG: &str = "--otlp-endpoint";

/// The reason why spans cannot be exported as configured. No error has the value of a header, or a URL, which may have a password.
#[derive(Debug, thiserror::Error)]
pub enum OtlpError {
    /// The protocol is not supported.
    #[error("{name}: protocol {value:?} is not supported, expected grpc or http/protobuf")]
    Protocol {
        /// The variable.
        name: String,
        /// The value that was set.
        value: String,
    },
    /// The endpoint is not a URL that the protocol can use.
    #[error("{name}: the endpoint is not a URL such as http://HOST:PORT or https://HOST:PORT")]
    Endpoint {
        /// The variable or the flag.
        name: String,
    },
    /// The headers are not `NAME=VALUE` pairs, separated by commas.
    #[error("{name}: header {position} is not NAME=VALUE")]
    Header {
        /// The variable.
        name: String,
        /// Position in the list, from 1.
        position: usize,
    },
    /// The time limit is invalid.
    #[error("{name}: {value:?} is not a number of milliseconds above 0")]
    Timeout {
        /// The variable.
        name: String,
        /// The value that was set.
        value: String,
    },
    /// A client certificate without a key, or a key without a certificate.
    #[error("{name} is set without {missing}")]
    Incomplete {
        /// The variable.
        name: String,
        /// The variable that is not set.
        missing: String,
    },
    /// A file has no certificate or key.
    #[error("{name}: failed to read {}", path.display())]
    Pem {
        /// The variable.
        name: String,
        /// The file.
        path: PathBuf,
        /// The cause.
        source: rustls::pki_types::pem::Error,
    },
    /// The certificates cannot be used.
    #[error("failed to use the certificates of the OTLP exporter")]
    Certificates(#[source] rustls::Error),
    /// No file of certificates is configured, and the machine has none.
    #[error("failed to read the trusted certificates of the machine")]
    NoRoots(#[source] std::io::Error),
}

/// Protocol of a collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protocol {
    Grpc,
    Http,
}

/// A file, and the variable that names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NamedFile {
    pub(crate) name: String,
    pub(crate) path: PathBuf,
}

/// Files of certificates. Each is read once, when the exporter is built.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TlsFiles {
    /// Authorities of the collector. Without it, those of the machine.
    pub(crate) authorities: Option<NamedFile>,
    /// Certificate and key of the client.
    pub(crate) client: Option<(NamedFile, NamedFile)>,
}

/// A collector, and how it is reached.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Collector {
    pub(crate) protocol: Protocol,
    /// URL with scheme, host and, for HTTP, the whole path.
    pub(crate) endpoint: Uri,
    pub(crate) headers: HeaderMap,
    /// Time limit of one export with its retries.
    pub(crate) timeout: Duration,
    pub(crate) tls: TlsFiles,
}

impl Collector {
    /// Returns the collector of the flag or, without it, of the environment; none if neither has an endpoint.
    pub(crate) fn from(
        flag: Option<&str>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Self>, OtlpError> {
        let variables = Variables(variable);
        let protocol = variables.protocol()?;
        let Some(endpoint) = variables.endpoint(flag, protocol)? else { return Ok(None) };
        Ok(Some(Self {
            protocol,
            endpoint,
            headers: variables.headers()?,
            timeout: variables.timeout()?,
            tls: variables.tls()?,
        }))
    }
}

/// The environment. A variable that is empty counts as not set.
struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    /// Returns the variable for traces with this ending or, without it, the one for all signals.
    fn of_traces(&self, ending: &str) -> Option<(String, String)> {
        let names =
            ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"].map(|start| format!("{start}{ending}"));
        names.into_iter().find_map(|name| self.get(&name).map(|value| (name, value)))
    }

    fn protocol(&self) -> Result<Protocol, OtlpError> {
        let Some((name, value)) = self.of_traces("PROTOCOL") else { return Ok(Protocol::Grpc) };
        match value.trim() {
            "grpc" => Ok(Protocol::Grpc),
            "http/protobuf" => Ok(Protocol::Http),
            _ => Err(OtlpError::Protocol { name, value }),
        }
    }

    fn endpoint(&self, flag: Option<&str>, protocol: Protocol) -> Result<Option<Uri>, OtlpError> {
        let flag = flag.filter(|value| !value.is_empty()).map(|value| (FLAG.to_owned(), value.to_owned()));
        let Some((name, value)) = flag.or_else(|| self.of_traces("ENDPOINT")) else { return Ok(None) };
        // The endpoint of traces is used as it is. Other endpoints are those of all signals.
        let is_base = name != "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
        let url = match protocol {
            Protocol::Grpc if !value.contains("://") => format!("{}://{value}", self.scheme_of_grpc()),
            Protocol::Grpc | Protocol::Http => value,
        };
        let uri: Option<Uri> = url.trim().parse().ok();
        let uri = uri.filter(|uri| matches!(uri.scheme_str(), Some("http" | "https")));
        let uri = uri.and_then(|uri| match (protocol, is_base) {
            (Protocol::Http, true) => below(uri, TRACES_PATH),
            (Protocol::Http, false) | (Protocol::Grpc, _) => Some(uri),
        });
        uri.map(Some).ok_or(OtlpError::Endpoint { name })
    }

    // Only an endpoint of gRPC without a scheme goes by this variable.
    fn scheme_of_grpc(&self) -> &'static str {
        let is_insecure = |(_, value): (String, String)| value.eq_ignore_ascii_case("true");
        if self.of_traces("INSECURE").is_some_and(is_insecure) { "http" } else { "https" }
    }

    fn headers(&self) -> Result<HeaderMap, OtlpError> {
        let mut headers = HeaderMap::new();
        let Some((name, list)) = self.of_traces("HEADERS") else { return Ok(headers) };
        let items = list.split(',').enumerate().filter(|(_, item)| !item.trim().is_empty());
        for (index, item) in items {
            let (key, value) = header(item)
                .ok_or_else(|| OtlpError::Header { name: name.clone(), position: index.saturating_add(1) })?;
            headers.append(key, value);
        }
        Ok(headers)
    }

    fn timeout(&self) -> Result<Duration, OtlpError> {
        let Some((name, value)) = self.of_traces("TIMEOUT") else { return Ok(TIMEOUT) };
        match value.trim().parse::<u32>() {
            Ok(milliseconds) if milliseconds > 0 => Ok(Duration::from_millis(milliseconds.into())),
            Ok(_) | Err(_) => Err(OtlpError::Timeout { name, value }),
        }
    }

    fn tls(&self) -> Result<TlsFiles, OtlpError> {
        let file = |ending: &str| {
            self.of_traces(ending).map(|(name, path)| NamedFile { name, path: PathBuf::from(path) })
        };
        let incomplete = |file: NamedFile, missing: &str| OtlpError::Incomplete {
            name: file.name,
            missing: format!("OTEL_EXPORTER_OTLP_{missing}"),
        };
        let client = match (file("CLIENT_CERTIFICATE"), file("CLIENT_KEY")) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            (Some(certificate), None) => return Err(incomplete(certificate, "CLIENT_KEY")),
            (None, Some(key)) => return Err(incomplete(key, "CLIENT_CERTIFICATE")),
        };
        Ok(TlsFiles { authorities: file("CERTIFICATE"), client })
    }
}

/// Appends a path to that of a URL.
fn below(uri: Uri, path: &str) -> Option<Uri> {
    let whole = format!("{}{path}", uri.path().trim_end_matches('/'));
    let mut parts = uri.into_parts();
    parts.path_and_query = Some(whole.parse().ok()?);
    Uri::from_parts(parts).ok()
}

/// Parses `NAME=VALUE`. The value is percent-encoded.
fn header(item: &str) -> Option<(HeaderName, HeaderValue)> {
    let (key, value) = item.split_once('=')?;
    let value: Vec<u8> = percent_encoding::percent_decode_str(value.trim()).collect();
    let mut value = HeaderValue::from_bytes(&value).ok()?;
    value.set_sensitive(true);
    Some((HeaderName::from_bytes(key.trim().as_bytes()).ok()?, value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collector(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<Collector>, OtlpError> {
        let find = |name: &str| variables.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Collector::from(flag, |ending| find(ending.strip_prefix("OTEL_EXPORTER_OTLP_").unwrap()))
    }

    #[test]
    fn the_endpoint_of_traces_is_used_as_it_is_and_other_endpoints_are_bases() {
        let http = ("PROTOCOL", "http/protobuf");
        let of_all = ("ENDPOINT", "http://all:4318");
        for (flag, variables, wanted) in [
            (None, vec![], None),
            (Some(""), vec![("ENDPOINT", "")], None),
            (Some("http://c:4317"), vec![], Some("http://c:4317/")),
            (None, vec![of_all], Some("http://all:4318/")),
            (None, vec![of_all, ("TRACES_ENDPOINT", "http://t:1")], Some("http://t:1/")),
            (Some("http://c:4317"), vec![of_all, ("TRACES_ENDPOINT", "http://t:1")], Some("http://c:4317/")),
            (None, vec![("ENDPOINT", "c:4317")], Some("https://c:4317/")),
            (None, vec![("ENDPOINT", "c:4317"), ("INSECURE", "true")], Some("http://c:4317/")),
            (None, vec![http, of_all], Some("http://all:4318/v1/traces")),
            (None, vec![http, ("ENDPOINT", "https://c/otlp/")], Some("https://c/otlp/v1/traces")),
            (Some("http://c:4318"), vec![http], Some("http://c:4318/v1/traces")),
            (None, vec![http, of_all, ("TRACES_ENDPOINT", "http://t:1/in?k=v")], Some("http://t:1/in?k=v")),
            (None, vec![http, ("TRACES_ENDPOINT", "http://t:1")], Some("http://t:1/")),
        ] {
            let found = collector(flag, &variables).unwrap();
            let endpoint = found.map(|c| c.endpoint.to_string());
            assert_eq!(endpoint.as_deref(), wanted, "{flag:?} {variables:?}");
        }
    }

    #[test]
    fn the_variable_of_traces_wins_over_the_one_of_all_signals() {
        let found = collector(
            Some("http://c:1"),
            &[
                ("PROTOCOL", "grpc"),
                ("TRACES_PROTOCOL", "http/protobuf"),
                ("TIMEOUT", "1"),
                ("TRACES_TIMEOUT", "250"),
                ("HEADERS", "a=1"),
                ("TRACES_HEADERS", "authorization=Bearer%20x, tenant=a=b,"),
                ("CERTIFICATE", "/ca"),
                ("CLIENT_CERTIFICATE", "/cert"),
                ("TRACES_CLIENT_KEY", "/key"),
            ],
        );
        let found = found.unwrap().unwrap();
        assert_eq!((found.protocol, found.timeout), (Protocol::Http, Duration::from_millis(250)));
        let header = |name: &str| found.headers.get(name).map(|value| value.to_str().unwrap());
        assert_eq!((header("authorization"), header("tenant")), (Some("Bearer x"), Some("a=b")));
        assert_eq!(header("a"), None);
        let file = |ending: &str, path: &str| NamedFile {
            name: format!("OTEL_EXPORTER_OTLP_{ending}"),
            path: path.into(),
        };
        let client = (file("CLIENT_CERTIFICATE", "/cert"), file("TRACES_CLIENT_KEY", "/key"));
        assert_eq!(
            found.tls,
            TlsFiles { authorities: Some(file("CERTIFICATE", "/ca")), client: Some(client) }
        );
        let plain = collector(Some("http://c:1"), &[]).unwrap().unwrap();
        assert_eq!((plain.protocol, plain.timeout), (Protocol::Grpc, Duration::from_secs(5)));
    }

    #[test]
    fn a_wrong_value_is_named_and_no_secret_is_shown() {
        for (variables, wanted) in [
            (
                vec![("PROTOCOL", "http/json")],
                "OTEL_EXPORTER_OTLP_PROTOCOL: protocol \"http/json\" is not supported, expected grpc or http/protobuf",
            ),
            (
                vec![("TRACES_TIMEOUT", "0")],
                "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT: \"0\" is not a number of milliseconds above 0",
            ),
            (
                vec![("TIMEOUT", "5s")],
                "OTEL_EXPORTER_OTLP_TIMEOUT: \"5s\" is not a number of milliseconds above 0",
            ),
            (vec![("HEADERS", "a=1,secret")], "OTEL_EXPORTER_OTLP_HEADERS: header 2 is not NAME=VALUE"),
            (vec![("HEADERS", "a=%0Asecret")], "OTEL_EXPORTER_OTLP_HEADERS: header 1 is not NAME=VALUE"),
            (
                vec![("CLIENT_KEY", "/k")],
                "OTEL_EXPORTER_OTLP_CLIENT_KEY is set without OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
            ),
            (
                vec![("CLIENT_CERTIFICATE", "/c")],
                "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE is set without OTEL_EXPORTER_OTLP_CLIENT_KEY",
            ),
        ] {
            assert_eq!(collector(Some("http://c:1"), &variables).unwrap_err().to_string(), wanted);
        }
        for url in ["c:4318", "ftp://secret@c", "http://", "/v1/traces", "http://a b"] {
            let variables = [("PROTOCOL", "http/protobuf"), ("ENDPOINT", url)];
            let error = collector(None, &variables).unwrap_err().to_string();
            let wanted = "OTEL_EXPORTER_OTLP_ENDPOINT: the endpoint is not a URL such as http://HOST:PORT or https://HOST:PORT";
            assert_eq!(error, wanted, "{url}");
        }
    }
}
