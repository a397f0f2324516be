//! Checks of texts, for [`crate::kind::Kind::Checked`]. Each check returns the problem of an invalid text, which follows the text in
//! a message.
#![allow(clippy::missing_errors_doc, reason = "all checks have the same error")]

use std::net::{IpAddr, SocketAddr};

use quintlet_model::quantity::Quantity;

/// Checks that a text is a quantity that is not negative.
pub fn quantity(text: &str) -> Result<(), String> {
    match Quantity::parse(text) {
        Ok(quantity) if quantity >= Quantity::default() => Ok(()),
        Ok(_) => Err("is negative".to_owned()),
        Err(_) => Err("is not a quantity, expected for example 500m, 2 or 1Gi".to_owned()),
    }
}

/// Checks that a text is a quantity of any sign: a negative log size disables rotation.
pub fn signed_quantity(text: &str) -> Result<(), String> {
    Quantity::parse(text).map(drop).map_err(|_| "is not a quantity, expected for example 10Mi".to_owned())
}

/// Checks that a text is an eviction threshold: a quantity above zero, or a percentage.
pub fn threshold(text: &str) -> Result<(), String> {
    if let Some(percent) = text.strip_suffix('%') {
        let digits = percent.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        return match percent.parse::<f64>() {
            Ok(percent) if digits && (0.0..=100.0).contains(&percent) => Ok(()),
            Ok(_) if digits => Err("is not between 0% and 100%".to_owned()),
            Ok(_) | Err(_) => Err("is neither a quantity nor a percentage".to_owned()),
        };
    }
    match Quantity::parse(text) {
        Ok(quantity) if quantity.is_positive() => Ok(()),
        Ok(_) => Err("must be positive".to_owned()),
        Err(_) => Err("is neither a quantity nor a percentage".to_owned()),
    }
}

/// Checks that a text is a percentage up to 100, such as `10%`.
pub fn percentage(text: &str) -> Result<(), String> {
    match text.strip_suffix('%').and_then(|p| p.parse::<u8>().ok()) {
        Some(percent) if percent <= 100 => Ok(()),
        Some(_) => Err("is above 100%".to_owned()),
        None => Err("is not a percentage, expected for example 50%".to_owned()),
    }
}

/// Checks that a text is an IP address.
pub fn address(text: &str) -> Result<(), String> {
    text.parse::<IpAddr>().map(drop).map_err(|_| "is not an IP address".to_owned())
}

/// Checks that a text is empty or an IP address.
pub fn address_or_none(text: &str) -> Result<(), String> {
    if text.is_empty() { Ok(()) } else { address(text) }
}

/// Checks that a text is `unix:///absolute/path`, or the path only.
pub fn unix_endpoint(text: &str) -> Result<(), String> {
    let path = text.strip_prefix("unix://").unwrap_or(text);
    if path.starts_with('/') { Ok(()) } else { Err("is not unix:///absolute/path".to_owned()) }
}

/// Checks that a text is an absolute, clean path of ASCII characters, as the kubelet requires for `podLogsDir`.
pub fn clean_path(text: &str) -> Result<(), String> {
    let clean = text == "/"
        || text.strip_prefix('/').is_some_and(|rest| rest.split('/').all(|p| !matches!(p, "" | "." | "..")));
    match () {
        () if !text.starts_with('/') => Err("is not an absolute path".to_owned()),
        () if !text.is_ascii() => Err("has letters that are not ASCII".to_owned()),
        () if !clean => Err("is not a clean path: no //, no trailing /, no . or ..".to_owned()),
        () => Ok(()),
    }
}

/// Checks that a text is `host:port`, or an `http` or `https` URL.
pub fn collector(text: &str) -> Result<(), String> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let host = rest.unwrap_or(text).split('/').next().unwrap_or_default();
    let port =
        host.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if port && host.bytes().all(|b| b.is_ascii_graphic()) {
        Ok(())
    } else {
        Err("is not host:port".to_owned())
    }
}

/// Checks that a text is an address to listen on, such as `127.0.0.1:9101`.
pub fn listen(text: &str) -> Result<(), String> {
    text.parse::<SocketAddr>()
        .map(drop)
        .map_err(|_| "is not an address with a port, expected for example 127.0.0.1:9101".to_owned())
}
