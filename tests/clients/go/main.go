// Runs one check of OpenAI's client for Go: `main BASE_URL CHECK`. check_openai_go.py builds and calls it.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
)

const (
	model          = "smollm2"
	embeddingModel = "encoder"
	question       = "Paris is the capital of France. It has 2 million people."
)

var checks = map[string]func(context.Context, openai.Client) error{
	"models":     models,
	"chat":       chat,
	"stream":     stream,
	"tools":      tools,
	"embeddings": embeddings,
	"errors":     refusals,
}

func main() {
	client := openai.NewClient(option.WithBaseURL(os.Args[1]), option.WithAPIKey("none"), option.WithMaxRetries(0))
	if err := checks[os.Args[2]](context.Background(), client); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func asking(maxTokens int64) openai.ChatCompletionNewParams {
	return openai.ChatCompletionNewParams{
		Model:       model,
		Messages:    []openai.ChatCompletionMessageParamUnion{openai.UserMessage(question)},
		MaxTokens:   openai.Int(maxTokens),
		Temperature: openai.Float(0),
	}
}

func models(ctx context.Context, client openai.Client) error {
	page, err := client.Models.List(ctx)
	if err != nil {
		return err
	}
	for _, each := range page.Data {
		if each.ID == model {
			one, err := client.Models.Get(ctx, model)
			if err == nil && one.ID != model {
				err = fmt.Errorf("the model is %q", one.ID)
			}
			return err
		}
	}
	return fmt.Errorf("no %s among %v", model, page.Data)
}

func chat(ctx context.Context, client openai.Client) error {
	answer, err := client.Chat.Completions.New(ctx, asking(16))
	if err != nil {
		return err
	}
	if answer.Choices[0].Message.Content == "" || answer.Usage.CompletionTokens == 0 {
		return fmt.Errorf("no text or no usage: %s", answer.RawJSON())
	}
	return nil
}

func stream(ctx context.Context, client openai.Client) error {
	whole, err := client.Chat.Completions.New(ctx, asking(16))
	if err != nil {
		return err
	}
	params := asking(16)
	params.StreamOptions = openai.ChatCompletionStreamOptionsParam{IncludeUsage: openai.Bool(true)}
	events := client.Chat.Completions.NewStreaming(ctx, params)
	sum := openai.ChatCompletionAccumulator{}
	for events.Next() {
		if !sum.AddChunk(events.Current()) {
			return fmt.Errorf("a chunk of another answer: %s", events.Current().RawJSON())
		}
	}
	if events.Err() != nil {
		return events.Err()
	}
	if sum.Choices[0].Message.Content != whole.Choices[0].Message.Content {
		return fmt.Errorf("%q streamed, %q plain", sum.Choices[0].Message.Content, whole.Choices[0].Message.Content)
	}
	if sum.Usage.CompletionTokens != whole.Usage.CompletionTokens {
		return fmt.Errorf("%d tokens streamed, %d plain", sum.Usage.CompletionTokens, whole.Usage.CompletionTokens)
	}
	return nil
}

func tools(ctx context.Context, client openai.Client) error {
	params := asking(100)
	params.ParallelToolCalls = openai.Bool(false)
	params.Tools = []openai.ChatCompletionToolUnionParam{
		openai.ChatCompletionFunctionTool(openai.FunctionDefinitionParam{
			Name:        "record_city",
			Description: openai.String("Record a city"),
			Parameters: openai.FunctionParameters{
				"type": "object",
				"properties": map[string]any{
					"name":   map[string]any{"type": "string", "maxLength": 20},
					"people": map[string]any{"type": "integer", "minimum": 0, "maximum": 100000000},
				},
				"required":             []string{"name", "people"},
				"additionalProperties": false,
			},
		}),
	}
	params.ToolChoice = openai.ToolChoiceOptionFunctionToolChoice(
		openai.ChatCompletionNamedToolChoiceFunctionParam{Name: "record_city"},
	)
	answer, err := client.Chat.Completions.New(ctx, params)
	if err != nil {
		return err
	}
	message := answer.Choices[0].Message
	if len(message.ToolCalls) != 1 || message.ToolCalls[0].Function.Name != "record_city" {
		return fmt.Errorf("no call: %s", answer.RawJSON())
	}
	var city struct {
		Name   string
		People int
	}
	if err := json.Unmarshal([]byte(message.ToolCalls[0].Function.Arguments), &city); err != nil {
		return err
	}
	after := asking(16)
	after.Tools = params.Tools
	after.Messages = append(params.Messages, message.ToParam(), openai.ToolMessage("recorded", message.ToolCalls[0].ID))
	answer, err = client.Chat.Completions.New(ctx, after)
	if err == nil && len(answer.Choices) != 1 {
		err = fmt.Errorf("%d choices", len(answer.Choices))
	}
	return err
}

func embeddings(ctx context.Context, client openai.Client) error {
	answer, err := client.Embeddings.New(ctx, openai.EmbeddingNewParams{
		Model: embeddingModel,
		Input: openai.EmbeddingNewParamsInputUnion{OfArrayOfStrings: []string{"a river", "a city"}},
	})
	if err != nil {
		return err
	}
	if len(answer.Data) != 2 || len(answer.Data[0].Embedding) == 0 {
		return fmt.Errorf("%d vectors", len(answer.Data))
	}
	return nil
}

func refusals(ctx context.Context, client openai.Client) error {
	unknown := asking(4)
	unknown.Model = "nope"
	if err := refused(ctx, client, unknown, 404, "model_not_found", "model"); err != nil {
		return err
	}
	hot := asking(4)
	hot.Temperature = openai.Float(3)
	return refused(ctx, client, hot, 400, "", "temperature")
}

func refused(
	ctx context.Context, client openai.Client, params openai.ChatCompletionNewParams, status int, code, param string,
) error {
	_, err := client.Chat.Completions.New(ctx, params)
	var refusal *openai.Error
	if !errors.As(err, &refusal) {
		return fmt.Errorf("no error of the API: %v", err)
	}
	if refusal.StatusCode != status || refusal.Param != param || (code != "" && refusal.Code != code) {
		return fmt.Errorf("%d %q %q: %s", refusal.StatusCode, refusal.Code, refusal.Param, refusal.RawJSON())
	}
	return nil
}
