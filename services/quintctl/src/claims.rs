//! `quintctl claims`: the drivers of dynamic resource allocation, and the claims that are prepared for pods.

use quintctl_text::{NOTHING, clean, or_nothing, several, short_name, table};
use quintlet_kit::args::paths::Paths;
use quintlet_proto::podsync::v1::claims_client::ClaimsClient;
use quintlet_proto::podsync::v1::{
    ClaimDriver, ClaimDriverPlugin, ClaimState, ClaimUser, ClaimView, ListClaimsReply, ListClaimsRequest,
};
use serde_json::{Value, json};

use crate::client::Peer;
use crate::error::Error;
use crate::out::{Format, print};

/// Number of pods and of CDI devices of a claim in the table.
const SHOWN: usize = 4;

/// Lists the claims.
///
/// # Errors
/// pod-sync does not answer, or the output cannot be written.
pub(crate) async fn run(paths: &Paths, format: Format) -> Result<(), Error> {
    let peer = Peer::pod_sync(paths);
    let mut client = ClaimsClient::new(peer.channel().await?);
    let reply = peer.list(client.list(ListClaimsRequest {})).await?;
    print(format.render(&data(&reply), |wide| render(&reply, wide))?)
}

/// Formats the table of drivers, and that of the claims; `wide` adds all pods and devices and the UIDs of the
/// claims.
#[must_use]
pub(crate) fn render(reply: &ListClaimsReply, wide: bool) -> String {
    if reply.drivers.is_empty() && reply.claims.is_empty() {
        return "no DRA driver has registered\n".to_owned();
    }
    let row = |driver: &ClaimDriver| vec![clean(&driver.name), plugins(driver), clean(&driver.error)];
    let mut out =
        table(&["DRIVER", "PLUGIN", "LAST ERROR"], &reply.drivers.iter().map(row).collect::<Vec<_>>());
    if !reply.claims.is_empty() {
        out.push('\n');
        let mut header = vec!["CLAIM", "STATE", "DRIVERS", "PODS", "CDI DEVICES"];
        if wide {
            header.push("CLAIM UID");
        }
        let row = |claim: &ClaimView| claim_row(claim, wide);
        out.push_str(&table(&header, &reply.claims.iter().map(row).collect::<Vec<_>>()));
    }
    out
}

fn claim_row(claim: &ClaimView, wide: bool) -> Vec<String> {
    let shown = if wide { usize::MAX } else { SHOWN };
    let user = |user: &ClaimUser| short_name(&user.pod, &user.pod_uid);
    let pods: Vec<String> = claim.users.iter().map(user).collect();
    let mut row = vec![
        short_name(&format!("{}/{}", claim.namespace, claim.name), ""),
        state(claim).to_owned(),
        or_nothing(&clean(&claim.drivers.join(", "))),
        or_nothing(&several(&pods, shown, claim.user_count)),
        or_nothing(&several(&claim.cdi_devices, shown, claim.cdi_device_count)),
    ];
    if wide {
        row.push(clean(&claim.uid));
    }
    row
}

/// Returns the endpoints of a driver. That of the plugin that is called is the last one that is connected.
fn plugins(driver: &ClaimDriver) -> String {
    if driver.plugins.is_empty() {
        return "not registered".to_owned();
    }
    let plugin = |plugin: &ClaimDriverPlugin| match plugin.is_connected {
        true => clean(&plugin.endpoint),
        false => format!("{} (not connected)", clean(&plugin.endpoint)),
    };
    driver.plugins.iter().map(plugin).collect::<Vec<_>>().join(", ")
}

fn state(claim: &ClaimView) -> &'static str {
    match claim.state() {
        ClaimState::Uncertain => "not prepared",
        ClaimState::Prepared => "prepared",
        ClaimState::Busy => "in a call",
        ClaimState::Unspecified => NOTHING,
    }
}

/// Returns the claims for JSON and YAML output.
fn data(reply: &ListClaimsReply) -> Value {
    let driver = |driver: &ClaimDriver| {
        let plugin = |plugin: &ClaimDriverPlugin| json!({"endpoint": plugin.endpoint, "connected": plugin.is_connected});
        let plugins: Vec<Value> = driver.plugins.iter().map(plugin).collect();
        json!({"name": driver.name, "plugins": plugins, "error": driver.error})
    };
    let claim = |claim: &ClaimView| {
        let state = match claim.state() {
            ClaimState::Uncertain => "Uncertain",
            ClaimState::Prepared => "Prepared",
            ClaimState::Busy => "Busy",
            ClaimState::Unspecified => "Unknown",
        };
        let pod = |user: &ClaimUser| json!({"podUid": user.pod_uid, "pod": user.pod});
        let pods: Vec<Value> = claim.users.iter().map(pod).collect();
        let ClaimView { namespace, name, uid, drivers, user_count, cdi_devices, cdi_device_count, .. } =
            claim;
        json!({
            "namespace": namespace, "name": name, "uid": uid, "state": state, "drivers": drivers, "pods": pods, "podCount": user_count,
            "cdiDevices": cdi_devices, "cdiDeviceCount": cdi_device_count,
        })
    };
    let drivers: Vec<Value> = reply.drivers.iter().map(driver).collect();
    json!({"drivers": drivers, "claims": reply.claims.iter().map(claim).collect::<Vec<_>>()})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn driver(name: &str, plugins: &[(&str, bool)], error: &str) -> ClaimDriver {
        let plugin = |(endpoint, is_connected): &(&str, bool)| ClaimDriverPlugin {
            endpoint: (*endpoint).to_owned(),
            is_connected: *is_connected,
        };
        let plugins = plugins.iter().map(plugin).collect();
        ClaimDriver { name: name.to_owned(), plugins, error: error.to_owned() }
    }

    fn claim(namespace: &str, name: &str, state: ClaimState, pods: &[&str], devices: &[&str]) -> ClaimView {
        let user = |pod: &&str| ClaimUser { pod_uid: "uid-1".to_owned(), pod: (*pod).to_owned() };
        ClaimView {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            uid: "uid-c".to_owned(),
            state: state.into(),
            drivers: vec!["gpu.example.com".to_owned()],
            users: pods.iter().map(user).collect(),
            user_count: u64::try_from(pods.len()).unwrap(),
            cdi_devices: devices.iter().map(|name| (*name).to_owned()).collect(),
            cdi_device_count: u64::try_from(devices.len()).unwrap(),
        }
    }

    #[test]
    fn the_tables_have_the_plugins_of_each_driver_and_the_pods_of_each_claim() {
        let many = ["a.com/gpu=1", "a.com/gpu=2", "a.com/gpu=3", "a.com/gpu=4", "a.com/gpu=5"];
        let shared = claim("other", "shared", ClaimState::Uncertain, &["other/a", ""], &many);
        let reply = ListClaimsReply {
            drivers: vec![
                driver("gpu.example.com", &[("/p/old.sock", false), ("/p/new.sock", true)], ""),
                driver("nic.example.com", &[], "NodePrepareResources:\n it broke"),
            ],
            claims: vec![
                claim("default", "gpu", ClaimState::Prepared, &["default/web"], &["a.com/gpu=0"]),
                claim("default", "late", ClaimState::Busy, &["default/late"], &[]),
                ClaimView { cdi_device_count: 100, ..shared },
            ],
        };
        let expected = "\
DRIVER           PLUGIN                                    LAST ERROR
gpu.example.com  /p/old.sock (not connected), /p/new.sock
nic.example.com  not registered                            NodePrepareResources:  it broke

CLAIM         STATE         DRIVERS          PODS            CDI DEVICES
gpu           prepared      gpu.example.com  web             a.com/gpu=0
late          in a call     gpu.example.com  late            –
other/shared  not prepared  gpu.example.com  other/a, uid-1  a.com/gpu=1, a.com/gpu=2, a.com/gpu=3, a.com/gpu=4 and 96 more
";
        assert_eq!(render(&reply, false), expected);
        let wide = render(&reply, true);
        assert!(wide.contains("a.com/gpu=4, a.com/gpu=5 and 95 more  uid-c"), "{wide}");
        assert_eq!(render(&ListClaimsReply::default(), false), "no DRA driver has registered\n");
    }

    #[test]
    fn data_names_the_state_of_each_claim() {
        for (state, name) in [
            (ClaimState::Uncertain, "Uncertain"),
            (ClaimState::Prepared, "Prepared"),
            (ClaimState::Busy, "Busy"),
        ] {
            let drivers = vec![driver("gpu.example.com", &[("/p/gpu.sock", true)], "")];
            let reply =
                ListClaimsReply { drivers, claims: vec![claim("ns", "gpu", state, &["ns/web"], &[])] };
            let value = data(&reply);
            assert_eq!(value["drivers"][0]["plugins"][0]["connected"], true);
            assert_eq!(
                (&value["claims"][0]["state"], &value["claims"][0]["podCount"]),
                (&name.into(), &1.into())
            );
        }
    }
}
