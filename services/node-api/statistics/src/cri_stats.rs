//! Converts CRI statistics to the JSON of the summary.

use jiff::Timestamp;
use quintlet_cri_api::v1;
use serde_json::{Map, Value, json};

/// Returns an object without null fields.
pub(super) fn object<'a>(pairs: impl IntoIterator<Item = (&'a str, Value)>) -> Value {
    let there = pairs.into_iter().filter(|(_, v)| !v.is_null());
    Value::Object(there.map(|(k, v)| (k.to_owned(), v)).collect::<Map<_, _>>())
}

pub(super) fn time(nanos: i64) -> Value {
    json!(Timestamp::from_nanosecond(i128::from(nanos)).unwrap_or_default().to_string())
}

pub(super) fn number(value: Option<v1::UInt64Value>) -> Value {
    json!(value.map(|v| v.value))
}

pub(super) fn cpu(cpu: Option<&v1::CpuUsage>, psi: &Value) -> Value {
    cpu.map_or(Value::Null, |c| {
        object([
            ("time", time(c.timestamp)),
            ("usageNanoCores", number(c.usage_nano_cores)),
            ("usageCoreNanoSeconds", number(c.usage_core_nano_seconds)),
            ("psi", psi.clone()),
        ])
    })
}

pub(super) fn memory(memory: Option<&v1::MemoryUsage>, psi: &Value) -> Value {
    memory.map_or(Value::Null, |m| {
        object([
            ("time", time(m.timestamp)),
            ("availableBytes", number(m.available_bytes)),
            ("usageBytes", number(m.usage_bytes)),
            ("workingSetBytes", number(m.working_set_bytes)),
            ("rssBytes", number(m.rss_bytes)),
            ("pageFaults", number(m.page_faults)),
            ("majorPageFaults", number(m.major_page_faults)),
            ("psi", psi.clone()),
        ])
    })
}

/// Returns the time spent waiting for disks, or null if the runtime does not report it.
pub(super) fn io(time: &str, psi: &Value) -> Value {
    if psi.is_null() { Value::Null } else { json!({"time": time, "psi": psi}) }
}

pub(super) fn swap(swap: Option<&v1::SwapUsage>) -> Value {
    swap.map_or(Value::Null, |s| {
        object([
            ("time", time(s.timestamp)),
            ("swapAvailableBytes", number(s.swap_available_bytes)),
            ("swapUsageBytes", number(s.swap_usage_bytes)),
        ])
    })
}

fn interface(i: &v1::NetworkInterfaceUsage) -> Vec<(&'static str, Value)> {
    vec![
        ("name", json!(i.name)),
        ("rxBytes", number(i.rx_bytes)),
        ("rxErrors", number(i.rx_errors)),
        ("txBytes", number(i.tx_bytes)),
        ("txErrors", number(i.tx_errors)),
    ]
}

pub(super) fn network(network: Option<&v1::NetworkUsage>) -> Value {
    network.map_or(Value::Null, |n| {
        let all = n.default_interface.iter().chain(&n.interfaces);
        let interfaces: Vec<Value> = all.map(|i| object(interface(i))).collect();
        let mut out = vec![("time", time(n.timestamp)), ("interfaces", json!(interfaces))];
        out.extend(n.default_interface.iter().flat_map(interface));
        object(out)
    })
}
