//! Serializes ports and hooks for container annotations like Go's encoder, with its field order and escapes,
//! so that the annotations are equal to a kubelet's.

use k8s_openapi::api::core::v1::{ContainerPort, HTTPGetAction, LifecycleHandler, TCPSocketAction};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use quintlet_model::hash::escape_as_go;
use serde::Serialize;

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Port<'a> {
    #[serde(skip_serializing_if = "is_empty")]
    name: Option<&'a str>,
    #[serde(skip_serializing_if = "is_zero")]
    host_port: i32,
    container_port: i32,
    #[serde(skip_serializing_if = "is_empty")]
    protocol: Option<&'a str>,
    #[serde(rename = "hostIP", skip_serializing_if = "is_empty")]
    host_ip: Option<&'a str>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Handler<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    exec: Option<Exec<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    http_get: Option<HttpGet<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tcp_socket: Option<TcpSocket<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sleep: Option<Sleep>,
}

#[derive(Serialize)]
struct Exec<'a> {
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    command: &'a [String],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct HttpGet<'a> {
    #[serde(skip_serializing_if = "is_empty")]
    path: Option<&'a str>,
    port: &'a IntOrString,
    #[serde(skip_serializing_if = "is_empty")]
    host: Option<&'a str>,
    #[serde(skip_serializing_if = "is_empty")]
    scheme: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    http_headers: Vec<Header<'a>>,
}

#[derive(Serialize)]
struct Header<'a> {
    name: &'a str,
    value: &'a str,
}

#[derive(Serialize)]
struct TcpSocket<'a> {
    port: &'a IntOrString,
    #[serde(skip_serializing_if = "is_empty")]
    host: Option<&'a str>,
}

#[derive(Serialize)]
struct Sleep {
    seconds: i64,
}

fn is_empty(text: &Option<&str>) -> bool {
    text.is_none_or(str::is_empty)
}

// The signature is required by serde.
#[allow(clippy::trivially_copy_pass_by_ref)]
fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// Serializes the ports of a container.
///
/// # Errors
/// Serialization failed; no input is known to cause this.
pub(crate) fn ports(ports: &[ContainerPort]) -> Result<String, serde_json::Error> {
    let all: Vec<Port<'_>> = ports
        .iter()
        .map(|p| Port {
            name: p.name.as_deref(),
            host_port: p.host_port.unwrap_or(0),
            container_port: p.container_port,
            protocol: p.protocol.as_deref(),
            host_ip: p.host_ip.as_deref(),
        })
        .collect();
    Ok(escape_as_go(&serde_json::to_string(&all)?))
}

/// Serializes a lifecycle hook.
///
/// # Errors
/// Serialization failed; no input is known to cause this.
pub(crate) fn handler(hook: &LifecycleHandler) -> Result<String, serde_json::Error> {
    let handler = Handler {
        exec: hook.exec.as_ref().map(|e| Exec { command: e.command.as_deref().unwrap_or_default() }),
        http_get: hook.http_get.as_ref().map(http_get),
        tcp_socket: hook.tcp_socket.as_ref().map(tcp_socket),
        sleep: hook.sleep.as_ref().map(|s| Sleep { seconds: s.seconds }),
    };
    Ok(escape_as_go(&serde_json::to_string(&handler)?))
}

fn http_get(get: &HTTPGetAction) -> HttpGet<'_> {
    let headers = get.http_headers.iter().flatten();
    HttpGet {
        path: get.path.as_deref(),
        port: &get.port,
        host: get.host.as_deref(),
        scheme: get.scheme.as_deref(),
        http_headers: headers.map(|h| Header { name: &h.name, value: &h.value }).collect(),
    }
}

fn tcp_socket(socket: &TCPSocketAction) -> TcpSocket<'_> {
    TcpSocket { port: &socket.port, host: socket.host.as_deref() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn json_has_the_order_omissions_and_escapes_of_go() {
        let all: Vec<ContainerPort> = serde_json::from_value(json!([
            {"hostIP": "10.0.0.1", "protocol": "UDP", "containerPort": 53, "hostPort": 5353, "name": "dns"},
            {"containerPort": 80, "hostPort": 0, "name": ""},
        ]))
        .unwrap();
        assert_eq!(
            ports(&all).unwrap(),
            r#"[{"name":"dns","hostPort":5353,"containerPort":53,"protocol":"UDP","hostIP":"10.0.0.1"},{"containerPort":80}]"#
        );
        for (hook, want) in [
            (
                json!({"httpGet": {"host": "h", "httpHeaders": [{"value": "v", "name": "N"}], "path": "/a?b&c<d>", "port": "web", "scheme": "HTTPS"}}),
                r#"{"httpGet":{"path":"/a?b\u0026c\u003cd\u003e","port":"web","host":"h","scheme":"HTTPS","httpHeaders":[{"name":"N","value":"v"}]}}"#,
            ),
            (json!({"exec": {"command": ["a", "\u{2028}"]}}), r#"{"exec":{"command":["a","\u2028"]}}"#),
            (json!({"exec": {}}), r#"{"exec":{}}"#),
            (json!({"tcpSocket": {"port": 9, "host": ""}}), r#"{"tcpSocket":{"port":9}}"#),
            (json!({"sleep": {"seconds": 0}}), r#"{"sleep":{"seconds":0}}"#),
        ] {
            assert_eq!(handler(&serde_json::from_value(hook).unwrap()).unwrap(), want);
        }
    }
}
