//! The format of tool calls in answers.

use serde::Serialize;

use crate::text::tools::CallDelta;

/// A call in an answer.
#[derive(Debug, Serialize)]
pub(crate) struct ToolCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: FunctionCall<'a>,
}

#[derive(Debug, Serialize)]
struct FunctionCall<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> ToolCall<'a> {
    /// Makes the form of a call in a complete answer.
    pub(crate) fn whole(call: &'a CallDelta) -> Self {
        Self { index: None, ..Self::part(call) }
    }

    /// Makes the form of a part of a call in a stream.
    pub(crate) fn part(call: &'a CallDelta) -> Self {
        let start = call.start.as_ref();
        let function =
            FunctionCall { name: start.map(|start| start.name.as_str()), arguments: &call.arguments };
        Self {
            index: Some(call.index),
            id: start.map(|start| start.id.as_str()),
            kind: start.map(|_| "function"),
            function,
        }
    }
}
