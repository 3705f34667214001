//! Runs one check of the client async-openai: `program BASE_URL CHECK`. check_async_openai.py builds and calls it.

use std::env;
use std::error::Error;

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{ChatCompletionMessageToolCalls, CreateChatCompletionRequest};
use async_openai::types::embeddings::CreateEmbeddingRequest;
use futures::StreamExt;
use serde_json::{Value, from_str, from_value, json};

const MODEL: &str = "smollm2";
const EMBEDDING_MODEL: &str = "encoder";
const QUESTION: &str = "Paris is the capital of France. It has 2 million people.";

type Outcome = Result<(), Box<dyn Error>>;
type Api = Client<OpenAIConfig>;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Outcome {
    let arguments: Vec<String> = env::args().collect();
    let config = OpenAIConfig::new().with_api_base(&arguments[1]).with_api_key("none");
    let client = Client::with_config(config);
    match arguments[2].as_str() {
        "models" => models(&client).await,
        "chat" => chat(&client).await,
        "stream" => stream(&client).await,
        "tools" => tools(&client).await,
        "embeddings" => embeddings(&client).await,
        "errors" => refusals(&client).await,
        other => Err(format!("no check {other}").into()),
    }
}

/// The client's own type of a request, with `fields` beside those that all requests have.
fn asking(fields: Value) -> Result<CreateChatCompletionRequest, serde_json::Error> {
    let mut body = json!({
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_completion_tokens": 16,
        "temperature": 0.0,
    });
    for (name, value) in fields.as_object().into_iter().flatten() {
        body[name] = value.clone();
    }
    from_value(body)
}

fn expect(holds: bool, words: impl Into<String>) -> Outcome {
    if holds { Ok(()) } else { Err(words.into().into()) }
}

async fn models(client: &Api) -> Outcome {
    let all = client.models().list().await?;
    expect(all.data.iter().any(|each| each.id == MODEL), format!("no {MODEL} among {all:?}"))?;
    let one = client.models().retrieve(MODEL).await?;
    expect(one.id == MODEL, format!("{one:?}"))
}

async fn chat(client: &Api) -> Outcome {
    let answer = client.chat().create(asking(json!({}))?).await?;
    let has_text = answer.choices[0].message.content.as_ref().is_some_and(|text| !text.is_empty());
    let has_usage = answer.usage.as_ref().is_some_and(|usage| usage.completion_tokens > 0);
    expect(has_text && has_usage, format!("{answer:?}"))
}

async fn stream(client: &Api) -> Outcome {
    let whole = client.chat().create(asking(json!({}))?).await?;
    let request = asking(json!({"stream": true, "stream_options": {"include_usage": true}}))?;
    let mut events = client.chat().create_stream(request).await?;
    let (mut text, mut usage) = (String::new(), None);
    while let Some(event) = events.next().await {
        let chunk = event?;
        for choice in &chunk.choices {
            text.push_str(choice.delta.content.as_deref().unwrap_or(""));
        }
        usage = chunk.usage.or(usage);
    }
    let plain = whole.choices[0].message.content.clone().unwrap_or_default();
    expect(text == plain, format!("{text:?} streamed, {plain:?} plain"))?;
    let (streamed, plain) = (usage.map(|each| each.completion_tokens), whole.usage.map(|each| each.completion_tokens));
    expect(streamed.is_some() && streamed == plain, format!("{streamed:?} tokens streamed, {plain:?} plain"))
}

async fn tools(client: &Api) -> Outcome {
    let tool = json!({"type": "function", "function": {
        "name": "record_city",
        "description": "Record a city",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "people": {"type": "integer", "minimum": 0, "maximum": 100000000},
            },
            "required": ["name", "people"],
            "additionalProperties": false,
        },
    }});
    let request = asking(json!({
        "max_completion_tokens": 100,
        "parallel_tool_calls": false,
        "tools": [tool],
        "tool_choice": {"type": "function", "function": {"name": "record_city"}},
    }))?;
    let answer = client.chat().create(request).await?;
    let calls = answer.choices[0].message.tool_calls.clone().unwrap_or_default();
    let [ChatCompletionMessageToolCalls::Function(call)] = &calls[..] else {
        return Err(format!("no call: {answer:?}").into());
    };
    let city: Value = from_str(&call.function.arguments)?;
    let is_city = call.function.name == "record_city" && city["name"].is_string() && city["people"].is_i64();
    expect(is_city, format!("{call:?}"))?;
    let after = asking(json!({
        "tools": [tool],
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.id, "content": "recorded"},
        ],
    }))?;
    let answer = client.chat().create(after).await?;
    expect(answer.choices.len() == 1, format!("{answer:?}"))
}

async fn embeddings(client: &Api) -> Outcome {
    let request: CreateEmbeddingRequest =
        from_value(json!({"model": EMBEDDING_MODEL, "input": ["a river", "a city"]}))?;
    let answer = client.embeddings().create(request).await?;
    let is_whole = answer.data.len() == 2 && answer.data.iter().all(|each| !each.embedding.is_empty());
    expect(is_whole, format!("{} vectors", answer.data.len()))
}

async fn refusals(client: &Api) -> Outcome {
    refused(client, json!({"model": "nope"}), 404, Some("model_not_found"), "model").await?;
    refused(client, json!({"temperature": 3.0}), 400, None, "temperature").await
}

async fn refused(client: &Api, fields: Value, status: u16, code: Option<&str>, param: &str) -> Outcome {
    match client.chat().create(asking(fields)?).await {
        Err(OpenAIError::ApiError(refusal)) => {
            let error = &refusal.api_error;
            let is_code = code.is_none() || error.code.as_deref() == code;
            let holds = refusal.status_code == status && is_code && error.param.as_deref() == Some(param);
            expect(holds, format!("{refusal:?}"))
        }
        other => Err(format!("no error of the API: {other:?}").into()),
    }
}
